"""Seconds from `megakernel serve` to /ready 200, with the model already fetched, and the memory it then takes.

Prints a table and one JSON line; exit code 1 if the slowest run took longer than --limit-s.
Knows the server from outside only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import httpx
import psutil

GIVE_UP_S = 120.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Start:
    """One start, from exec to ready. Memory is that of all the server's processes when it was ready."""

    ready_s: float
    resident_mib: float
    phases_s: dict[str, float] = field(default_factory=dict[str, float])  # as the server logs them


def measure(arguments: list[str]) -> Start:
    """Start a server, wait until it is ready, end it; RuntimeError if it never becomes ready."""
    port = _free_port()
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--log-format", "json", *arguments]
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    phases: dict[str, float] = {}
    reader = threading.Thread(target=_read_phases, args=(process.stderr, phases), daemon=True)
    reader.start()
    try:
        _wait_ready(f"http://127.0.0.1:{port}/ready", process)
        return Start(time.perf_counter() - began, _resident_mib(process.pid), phases)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        reader.join(5)


def _wait_ready(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.perf_counter() + GIVE_UP_S
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            if httpx.get(url, timeout=1, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(POLL_S)
    raise RuntimeError(f"not ready within {GIVE_UP_S:.0f} s")


def _read_phases(lines: Iterable[str], phases: dict[str, float]) -> None:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") == "phase finished":
            phases[record["phase"]] = record["seconds"]


def _resident_mib(pid: int) -> float:
    parent = psutil.Process(pid)
    return sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True))) / 2**20


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="measured starts, after one that warms the caches")
    parser.add_argument("--limit-s", type=float, default=12.0, help="fail when a start takes longer")
    options, passed_on = parser.parse_known_args()
    measure(passed_on)
    starts = [measure(passed_on) for _ in range(options.runs)]
    print(f"{'run':>4} {'ready':>8} {'memory':>10}  phases")
    for number, start in enumerate(starts, 1):
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in start.phases_s.items())
        print(f"{number:>4} {start.ready_s:>6.2f} s {start.resident_mib:>6.0f} MiB  {phases}")
    slowest = max(start.ready_s for start in starts)
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    row = {"benchmark": "startup", "slowest_s": slowest, "limit_s": options.limit_s, "machine": machine}
    print(json.dumps({**row, "arguments": passed_on, "runs": [asdict(start) for start in starts]}))
    return 0 if slowest <= options.limit_s else 1


if __name__ == "__main__":
    sys.exit(main())
