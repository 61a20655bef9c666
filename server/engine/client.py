"""The API process's way to the engine: submit, cancel, drain; one stream of replies a request.

Knows requests in flight and what to say when the engine cannot take them. Must not know: HTTP, text, processes.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path

from megakernel_runtime.interface import RuntimeSpec
from server.engine.messages import Cancel, EngineToApi, Failed, Hello, Loading, Observations, Rejected, Submit, Tokens
from server.engine.spec import EngineSpec
from server.engine.streams import Reply, Stream, Streams
from server.engine.supervisor import Supervision, Supervisor
from server.scheduling.settings import SchedulerSettings

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 100  # bytes; the kernel's bound is 108 on Linux and 104 on macOS
RETRY_AFTER_S = 2.0
STOPPING = "the server is stopping"

_NOT_READY = {
    "loading": ("not_ready", "the model is being loaded: try again in a moment"),
    "restarting": ("not_ready", "the engine failed and is started again: try again in a moment"),
    "draining": ("draining", "the server is stopping and takes no new requests: try again later or elsewhere"),
}


class EngineClient:
    """A supervised engine process and the requests in flight to it. Belongs to the event loop that starts it.

    `state` is loading, ready, draining, restarting or failed.
    """

    def __init__(
        self,
        runtime: RuntimeSpec,
        scheduler: SchedulerSettings,
        *,
        supervision: Supervision | None = None,
        log_level: str = "info",
        log_format: str = "json",
    ) -> None:
        self._supervision = supervision or Supervision()
        self._spec = EngineSpec(runtime, scheduler, self._supervision.hang_timeout_s, log_level, log_format)
        self._on_observations: list[Callable[[Observations], None]] = []
        self._on_state: list[Callable[[str], None]] = []
        self._state_changed = asyncio.Event()
        self._streams = Streams()
        self._directory: Path | None = None
        self._supervisor: Supervisor | None = None
        self._running: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the engine process and return; `state` and `loading` tell how far it is."""
        assert self._running is None, "started twice"
        self._directory = _private_directory()
        self._supervisor = Supervisor(
            self._spec,
            self._supervision,
            self._directory / "engine",
            on_message=self._take,
            on_state=self._note_state,
            on_lost=self._note_lost,
        )
        self._running = asyncio.create_task(self._supervisor.run(), name="engine-supervisor")

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing more; return when all that was accepted is done, or at the time-out."""
        if self._supervisor is None or self._running is None:
            return
        self._supervisor.drain()
        await asyncio.wait((self._running,), timeout=timeout_s)

    async def close(self) -> None:
        """End the engine now; requests in flight fail. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
        self._streams.fail_all(STOPPING, "stopping")
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # ---------------------------------------------------------------- how things stand

    @property
    def state(self) -> str:
        """loading, ready, draining, restarting or failed."""
        return "loading" if self._supervisor is None else self._supervisor.state

    @property
    def hello(self) -> Hello | None:
        """What is served; None until the first engine is ready. Stays while another one is started."""
        return None if self._supervisor is None else self._supervisor.hello

    @property
    def loading(self) -> Loading | None:
        """How far loading is; None when it is over."""
        return None if self._supervisor is None else self._supervisor.loading

    @property
    def failure(self) -> str | None:
        """Why no engine can be had, in state failed."""
        return None if self._supervisor is None else self._supervisor.failure

    @property
    def restarts(self) -> int:
        """How often an engine was started again after one had ended."""
        return 0 if self._supervisor is None else self._supervisor.restarts

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return None if self._supervisor is None else self._supervisor.pid

    @property
    def n_in_flight(self) -> int:
        """Requests whose streams are open."""
        return len(self._streams)

    async def wait_for(self, *states: str) -> str:
        """Return the state as soon as it is one of `states`, or failed."""
        while self.state not in (*states, "failed"):
            self._state_changed.clear()
            await self._state_changed.wait()
        return self.state

    def on_observations(self, callback: Callable[[Observations], None]) -> None:
        """Have `callback` called with everything that the engine measures."""
        self._on_observations.append(callback)

    def on_state(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called with each new state."""
        self._on_state.append(callback)

    # ---------------------------------------------------------------- requests

    async def submit(self, request: Submit) -> AsyncGenerator[Reply, None]:
        """Yield replies until the last choice has ended; a Rejected or Failed is the last. Nothing is sent before the
        first reply is asked for. Closing the generator early cancels the request. Raises ValueError for an id in use.
        """
        if (refusal := self._refusal(request.request_id)) is not None:
            yield refusal
            return
        stream = self._streams.open(request)
        try:
            self._send(request, stream)
            while (reply := await stream.next()) is not None:
                yield reply
        finally:
            if not stream.complete:
                self.cancel(Cancel(request.request_id))
            self._streams.close(request.request_id)

    def cancel(self, cancel: Cancel) -> None:
        """End a request or one choice of it; the stream then yields finish "cancelled" for what ended by this."""
        if self._supervisor is not None:
            self._supervisor.send(cancel)

    def _send(self, request: Submit, stream: Stream) -> None:
        if self._supervisor is None or not self._supervisor.send(request):
            stream.push(Failed(request.request_id, "the engine was lost"))

    def _refusal(self, request_id: str) -> Rejected | None:
        """Return why nothing can be submitted now, None if it can."""
        state = self.state
        if state == "ready":
            return None
        reason, message = _NOT_READY.get(state, ("not_ready", f"the engine failed: {self.failure}"))
        return Rejected(request_id, reason, message, RETRY_AFTER_S)

    # ---------------------------------------------------------------- from the supervisor

    def _take(self, message: EngineToApi) -> None:
        if isinstance(message, Tokens | Rejected | Failed):
            self._streams.deliver(message)
        elif isinstance(message, Observations):
            for callback in self._on_observations:
                callback(message)

    def _note_state(self, state: str) -> None:
        self._state_changed.set()
        for callback in self._on_state:
            callback(state)

    def _note_lost(self, why: str) -> None:
        if self.state == "draining":
            self._streams.fail_all(STOPPING, "stopping")
        else:
            self._streams.fail_all(f"the engine failed, try again: {why}")


def _private_directory() -> Path:
    """Return a new directory that only this user can enter, with a path short enough for a socket in it."""
    path = Path(tempfile.mkdtemp(prefix="megakernel-"))
    if len(bytes(path)) <= MAX_SOCKET_PATH - len("/engine"):
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix="megakernel-", dir="/tmp"))
