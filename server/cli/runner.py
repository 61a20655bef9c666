"""Runs the HTTP server until it is told to stop: listens, shows the engine's loading, drains on the first signal.

Knows uvicorn and the engine client's states. Must not know: routes, requests, settings.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, Protocol

import uvicorn
from typing_extensions import override

from server.api.connection import server_config
from server.cli.startup import Display
from server.engine.messages import Hello, Loading
from server.errors import ConfigError, MegakernelError
from server.plan import ServePlan

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05


class Engine(Protocol):
    """What is asked of `server.engine.client.EngineClient`."""

    @property
    def state(self) -> str:
        """loading, ready, draining, restarting or failed."""
        ...

    @property
    def hello(self) -> Hello | None:
        """What is served, once it is."""
        ...

    @property
    def loading(self) -> Loading | None:
        """How far loading is, while it is."""
        ...

    @property
    def failure(self) -> str | None:
        """Why it failed, once it did."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing more and return when nothing runs, or at the timeout."""
        ...

    async def close(self) -> None:
        """End now; what still runs is told that it failed."""
        ...


class EngineFailed(MegakernelError):
    """The engine did not come up; the message is its last word."""


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that a taken port is told before a model is loaded. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()  # bound: its closing is the caller's now
            return listener
    except OSError as error:
        remedy = "; choose another with --port, or 0 for a free one" if port else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}{remedy}") from None


def url_of(listener: socket.socket) -> str:
    """Return where this machine's own clients reach the server."""
    host, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (compared, not bound)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class DrainingServer(uvicorn.Server):
    """Exits with 0 on SIGTERM or SIGINT, after running requests have ended; at once on the second signal."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._told_to_stop = False
        self._draining: asyncio.Task[None] | None = None

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain; /ready and new requests answer 503 from now on, while running ones go on."""
        if self._told_to_stop:
            self.force_exit = self.should_exit = True
            return
        self._told_to_stop = True
        logger.info("draining", extra={"signal": signal.Signals(sig).name, "within_seconds": self._drain_seconds})
        asyncio.get_running_loop().call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._engine.drain(self._drain_seconds)
            await self._engine.close()  # what ran out of time gets its error while there is a connection to send it
        finally:
            self.should_exit = True


def run(app: Callable[..., Any], engine: Engine, plan: ServePlan, listener: socket.socket, display: Display) -> None:
    """Serve until a signal ends it. Raises EngineFailed when the engine cannot come up the first time."""
    config = server_config(app)
    server = DrainingServer(config, engine, plan.drain_seconds)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(server, engine, plan, listener, display))


async def _serve(
    server: DrainingServer, engine: Engine, plan: ServePlan, listener: socket.socket, display: Display
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    failure = await _watch(engine, serving, display)
    if failure is not None:
        server.should_exit = True
    elif engine.hello is not None and not serving.done():
        display.ready(plan, engine.hello, url_of(listener))
    await serving
    if failure is not None:
        raise EngineFailed(failure)


async def _watch(engine: Engine, serving: asyncio.Task[None], display: Display) -> str | None:
    """Show the engine's loading until it is ready or serving has ended; return why it failed, if it did."""
    while not serving.done() and engine.state in ("loading", "restarting"):
        if engine.loading is not None:
            display(engine.loading.phase, engine.loading.done, engine.loading.total)
        await asyncio.sleep(LOOK_EVERY_S)
    return engine.failure if engine.state == "failed" else None
