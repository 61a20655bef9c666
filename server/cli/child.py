"""A server of one's own for the length of a `with` block: started as a child process, watched until ready, ended after.

Knows the log lines that `megakernel serve --log-format json` writes. Must not know: what the server is used for.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

import msgspec

from server.errors import MegakernelError

SERVE = (sys.executable, "-m", "server.cli", "serve")
READY_WITHIN_S = 600.0  # a first start may fetch gigabytes
STOP_WITHIN_S = 10.0


class ChildError(MegakernelError):
    """The child ended, or said nothing for too long, before it was ready."""


@dataclass(frozen=True, slots=True)
class ChildServer:
    """A ready server. `api_key` is known to this process alone."""

    url: str
    api_key: str


@contextmanager
def child_server(
    arguments: tuple[str, ...], on_phase: Callable[[str], None], program: tuple[str, ...] = SERVE
) -> Generator[ChildServer]:
    """Run `megakernel serve *arguments` on a free loopback port; `on_phase` is told what it is doing meanwhile.

    Yields once it is ready; ends it on leaving. Raises ChildError with the child's last words.
    """
    key = secrets.token_urlsafe(24)
    process = subprocess.Popen(
        [*program, *arguments, "--host", "127.0.0.1", "--port", "0", "--log-format", "json"],
        env={**os.environ, "MEGAKERNEL_API_KEY": key},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is meant for the terminal's program, not for the server
    )
    try:
        with _ended_politely():
            yield ChildServer(_wait_ready(process, on_phase), key)
    finally:
        _end(process)


@contextmanager
def _ended_politely() -> Generator[None]:
    """Have SIGTERM and a closed terminal leave `with` blocks as an exit does: the child would live on by itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_ready(process: subprocess.Popen[str], on_phase: Callable[[str], None]) -> str:
    """Return the URL from the child's ready record."""
    assert process.stderr is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_drain, args=(process.stderr, lines), daemon=True).start()
    deadline = time.monotonic() + READY_WITHIN_S
    last_words = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            break
        if line is None:
            raise ChildError(f"the server ended with exit code {process.wait()}: {last_words or 'it said nothing'}")
        record = _record(line)
        if record.get("event") == "ready":
            return str(record["url"])
        if "phase" in record:
            on_phase(str(record["phase"]))
        if record.get("level") == "error":
            last_words = str(record["event"]).strip() or last_words
    raise ChildError(f"the server was not ready within {READY_WITHIN_S:.0f} s; {last_words}")


def _drain(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Read the child's log to its end, also after it is ready: a full pipe would stop the child."""
    for line in stream:
        lines.put(line)
    lines.put(None)


def _record(line: str) -> dict[str, Any]:
    """Return a log line's fields; a line that is no record (a crash's traceback) is an error in its own words."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"event": line, "level": "error"}


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stderr is not None:
        process.stderr.close()
