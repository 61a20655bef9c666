"""Keeps an engine process alive: starts it, connects, watches for signs of life, starts it again with growing pauses.

Knows processes, connections and the engine's states. Must not know: requests, HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.engine.link import EngineLink, connect
from server.engine.messages import PROTOCOL_VERSION, ApiToEngine, Drain, EngineToApi, Fault, Hello, LoadFailed, Loading
from server.engine.observer import IDLE_INTERVAL_S
from server.engine.process import EngineProcess
from server.engine.spec import EXIT_LOAD_FAILED, EngineSpec

logger = logging.getLogger(__name__)

CONNECT_EVERY_S = 0.01
WATCHES = 4  # looks within a time-out: only silent ones in a row mean that the engine hangs, and not this process


@dataclass(frozen=True, slots=True)
class Supervision:
    """When to give up on an engine, and how soon to start another."""

    hang_timeout_s: float = 60.0  # without a frame while ready: one step of a large model on a small CPU takes seconds
    load_timeout_s: float = 1800.0  # without a frame while loading
    end_within_s: float = 5.0  # for an engine that has hung up to exit by itself
    first_pause_s: float = 0.5  # before a restart; doubles with each
    longest_pause_s: float = 30.0
    stable_after_s: float = 60.0  # ready for so long: the next pause is the first again
    max_failed_starts: int = 5  # in a row, without getting ready: no further one is tried

    def __post_init__(self) -> None:
        """Refuse what would take a healthy engine for dead. Raises ValueError."""
        if self.hang_timeout_s < 2 * IDLE_INTERVAL_S:
            raise ValueError(
                f"hang_timeout_s is {self.hang_timeout_s:g}; an idle engine is heard from every {IDLE_INTERVAL_S:g} s, "
                f"so it must be at least {2 * IDLE_INTERVAL_S:g}"
            )


class Supervisor:
    """States: loading, ready, draining, restarting, failed. `failure` says why, once failed."""

    def __init__(
        self,
        spec: EngineSpec,
        supervision: Supervision,
        socket_path: Path,
        on_message: Callable[[EngineToApi], None],
        on_state: Callable[[str], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._supervision = supervision
        self._socket_path = socket_path
        self._on_message = on_message
        self._on_state = on_state
        self._on_lost = on_lost
        self._link: EngineLink | None = None
        self._process: EngineProcess | None = None
        self._failed_starts = 0
        self._pause_s = supervision.first_pause_s
        self._ready_at: float | None = None
        self.state = "loading"
        self.hello: Hello | None = None
        self.loading: Loading | None = None
        self.failure: str | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return None if self._process is None else self._process.pid

    def send(self, message: ApiToEngine) -> bool:
        """Send a message; return False if there is no connection."""
        return self._link is not None and self._link.send(message)

    def drain(self) -> None:
        """Admit nothing more; `run` returns when the engine has done what it had accepted."""
        if self.state == "failed":
            return
        loaded = self.state == "ready"
        self._set_state("draining")
        if not (loaded and self.send(Drain())) and self._process is not None:
            self._process.kill()  # nothing was accepted yet

    async def run(self) -> None:
        """Keep engines running until one has drained or none can be had. On cancellation the engine is killed."""
        while self.state != "draining":
            try:
                status = await self._live()
            except OSError as error:
                self.failure, status = f"the engine process cannot be started: {error}", 0
            if self.state == "draining":
                return
            if self.failure is not None or self._gives_up(status):
                self._set_state("failed")
                logger.error("no engine", extra={"why": self.failure})
                return
            pause_s = self._next_pause()
            logger.warning("engine ended, starting another", extra={"exit_status": status, "pause_s": pause_s})
            await asyncio.sleep(pause_s)
            self.restarts += 1

    # ---------------------------------------------------------------- one life

    async def _live(self) -> int:
        """Run one engine process to its end; return its exit status."""
        process = self._process = EngineProcess(self._spec, self._socket_path)
        self._ready_at = None
        try:
            self._link = await self._connect(process)
            if self._link is not None and await self._stays(self._link, process):
                self._lose()
                await asyncio.wait((process.exited,), timeout=self._supervision.end_within_s)
        finally:
            self._lose()
            process.kill()
            status = await asyncio.shield(process.exited)
            self._process = None
        return status

    async def _stays(self, link: EngineLink, process: EngineProcess) -> bool:
        """Wait until connection or process has ended; return False if the engine was silent for too long instead."""
        watch = asyncio.create_task(self._watch(link))
        try:
            await asyncio.wait((link.lost, process.exited, watch), return_when=asyncio.FIRST_COMPLETED)
            return not watch.done()
        finally:
            watch.cancel()

    async def _connect(self, process: EngineProcess) -> EngineLink | None:
        """Return a connection as soon as the engine listens; None if it ended before."""
        while not process.exited.done():
            try:
                return await connect(self._socket_path, self._take)
            except OSError:  # it does not listen yet
                await asyncio.sleep(CONNECT_EVERY_S)
        return None

    async def _watch(self, link: EngineLink) -> None:
        """Return when the engine has been silent for too long."""
        limits, silent_s = self._supervision, 0.0
        look_every_s = min(limits.hang_timeout_s, limits.load_timeout_s) / WATCHES
        while silent_s < (limits.load_timeout_s if self._ready_at is None else limits.hang_timeout_s):
            link.heard = False
            await asyncio.sleep(look_every_s)
            silent_s = 0.0 if link.heard else silent_s + look_every_s
        logger.error("engine gives no sign of life, killing it", extra={"pid": self.pid})

    def _take(self, message: EngineToApi) -> None:
        if isinstance(message, Loading):
            self.loading = message
        elif isinstance(message, LoadFailed):
            self.failure = message.message
            self._lose(message.message)
        elif isinstance(message, Fault):
            self._lose(message.message)
        elif isinstance(message, Hello):
            self._welcome(message)
        self._on_message(message)

    def _welcome(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            self.failure = f"the engine speaks protocol {hello.version}, this server {PROTOCOL_VERSION}: reinstall"
            self._lose(self.failure)
            return
        self.hello, self.loading, self._failed_starts = hello, None, 0
        self._ready_at = asyncio.get_running_loop().time()
        if self.state != "draining":
            self._set_state("ready")

    def _lose(self, why: str = "it ended unexpectedly") -> None:
        """The engine is gone or will be: nothing can be asked of it any more, nothing comes any more."""
        if self._link is None:
            return
        self._link.close()
        self._link = None
        if self.state == "ready":
            self._set_state("restarting")
        self._on_lost(why)

    def _set_state(self, state: str) -> None:
        self.state = state
        self._on_state(state)

    # ---------------------------------------------------------------- the next life

    def _gives_up(self, status: int) -> bool:
        """Whether starting again makes no sense, after an engine ended; says so in `failure`."""
        if self._ready_at is not None:
            return False
        self._failed_starts += 1
        tries = 1 if status == EXIT_LOAD_FAILED else self._supervision.max_failed_starts
        if self._failed_starts < tries:
            return False
        self.failure = (
            f"the engine ended {self._failed_starts} times before it was ready, the last time with exit status "
            f"{status}: its log says why"
        )
        return True

    def _next_pause(self) -> float:
        """Return how long to wait before the next start, in seconds."""
        limits, now = self._supervision, asyncio.get_running_loop().time()
        if self._ready_at is not None and now - self._ready_at >= limits.stable_after_s:
            self._pause_s = limits.first_pause_s
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, limits.longest_pause_s)
        return pause_s
