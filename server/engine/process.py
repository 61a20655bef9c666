"""One engine process as its parent sees it: started, ended, its exit status. Must not know: frames, why it is run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

from server.engine.spec import EngineSpec, encode_spec

PROGRAM = (sys.executable, "-m", "server.engine.main")
STDERR = 2  # also where the engine's stdout goes: libraries print there what people should see


class EngineProcess:
    """A running child. `exited` gets its exit status, negative for a signal.

    Starting takes milliseconds of the calling thread, and happens in it on purpose: the kernel ends the child when the
    *thread* that started it ends. The waiting is done by a thread of its own: the event loop's child watcher would do,
    but uvloop's works in the main thread only.
    """

    def __init__(self, spec: EngineSpec, socket_path: Path) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = loop.create_future()
        arguments = ["--socket", str(socket_path), "--spec", encode_spec(spec), "--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            start_new_session=True,  # a terminal's Ctrl-C and a group's SIGTERM are for the API process to act on
        )
        threading.Thread(target=self._wait, args=(loop,), name="engine-wait", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """End the process at once, also one that is stopped or hangs; nothing if it has ended."""
        self._process.kill()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()
        try:
            loop.call_soon_threadsafe(self._tell, status)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _tell(self, status: int) -> None:
        if not self.exited.done():
            self.exited.set_result(status)
