"""The engine process: `python -m server.engine.main --socket PATH --spec JSON [--parent PID]`.

Listens, loads the runtime, runs the loop, ends with its parent. Must not know: why it was started, HTTP, text.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from megakernel_runtime.interface import CapacityError, ModelError, Runtime
from server.engine.listener import Listener
from server.engine.loop import EngineLoop
from server.engine.messages import Drain, LoadFailed, Loading, Rejected, Submit
from server.engine.spec import EXIT_FAULT, EXIT_LOAD_FAILED, EngineSpec, decode_spec
from server.telemetry.logging import configure

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CLOSE_WITHIN_S = 1.0
PARENT_EVERY_S = 1.0
HEARD_WITHIN_S = 10.0  # the supervisor connects within milliseconds


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 after a drain, EXIT_LOAD_FAILED, EXIT_FAULT."""
    parser = argparse.ArgumentParser(prog="python -m server.engine.main", description="The engine process.")
    parser.add_argument("--socket", type=Path, required=True, help="unix socket to listen on")
    parser.add_argument("--spec", type=decode_spec, required=True, help="EngineSpec as JSON")
    parser.add_argument("--parent", type=int, default=0, help="process to end with; 0: none")
    options = parser.parse_args(arguments)
    spec: EngineSpec = options.spec
    end_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the API process decides
    configure(spec.log_level, spec.log_format)
    return Engine(spec, Listener(options.socket)).run()


def end_with_parent(parent: int) -> None:
    """Have this process end when the one that started it does, however that ends."""
    if not parent:
        return
    if sys.platform == "linux":  # the kernel sees to it, also when this process hangs
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=exit_when_orphaned, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the call above
        sys.exit(EXIT_FAULT)


def exit_when_orphaned(parent: int) -> None:
    """Look once a second whether the parent still is the parent; end this process at once when not."""
    while os.getppid() == parent:
        time.sleep(PARENT_EVERY_S)
    os._exit(EXIT_FAULT)


class Engine:
    """One life: loading, serving, the end."""

    def __init__(self, spec: EngineSpec, listener: Listener) -> None:
        self._spec = spec
        self._listener = listener

    def run(self) -> int:
        """Return the exit status."""
        try:
            runtime = self._load()
        except (ModelError, CapacityError) as error:
            logger.error("the model cannot be served", extra={"error": str(error)})  # noqa: TRY400 (no traceback)
            self._tell_failure(str(error))
            return EXIT_LOAD_FAILED
        try:
            self._serve(runtime)
        except Exception:
            logger.exception("the engine failed")
            return EXIT_FAULT
        finally:
            self._listener.close(CLOSE_WITHIN_S)
            runtime.close()
        return 0

    def _load(self) -> Runtime:
        from megakernel_runtime.factory import load_runtime

        self._progress("start", 0, 0)
        return load_runtime(self._spec.runtime, self._progress)

    def _progress(self, phase: str, done: int, total: int) -> None:
        """Tell every connection how far loading is, and new ones from now on; whoever asks for more must wait."""
        message = self._listener.greeting = Loading(phase, done, total)
        self._listener.broadcast(message)
        for connection, request in self._listener.receive(0.0):
            if isinstance(request, Submit):
                text = "the model is being loaded: try again later"
                self._listener.send(connection, Rejected(request.request_id, "not_ready", text))
            elif isinstance(request, Drain):
                sys.exit(0)
        self._listener.flush()

    def _tell_failure(self, message: str) -> None:
        """Stay until a connection has heard why, and hung up."""
        self._listener.greeting = LoadFailed(message)
        self._listener.broadcast(self._listener.greeting)
        deadline, heard = time.monotonic() + HEARD_WITHIN_S, False
        while time.monotonic() < deadline and not (heard and self._listener.n_connections == 0):
            heard = heard or self._listener.n_connections > 0
            self._listener.flush()
            self._listener.receive(0.1)
        self._listener.close(CLOSE_WITHIN_S)

    def _serve(self, runtime: Runtime) -> None:
        loop = EngineLoop(runtime, self._listener, self._spec.scheduler, stall_timeout_s=self._spec.stall_timeout_s)

        def drain(_signal: int, _frame: FrameType | None) -> None:
            loop.drain()

        signal.signal(signal.SIGTERM, drain)
        self._listener.greeting = loop.hello
        self._listener.broadcast(loop.hello)
        self._listener.flush()
        gc.collect()
        gc.freeze()  # what loading left stays: collections look at requests only, and take microseconds
        loop.run()


if __name__ == "__main__":
    sys.exit(main())
