"""What this machine lends a process: threads, memory, and how threads wait.

Standard library only, to be imported before torch. Must not know: models, torch.
"""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# Rounds that a thread of libgomp spins for its next work, some 0.2 ms: enough for the gaps within a step. By default it
# spins for 10 ms, which starves whoever shares the cores. A token of the default model on two threads (fp16), in ms,
# on free cores / with another busy process: 300000 rounds (libgomp's) 18 / 285, 7000 rounds 18 / 60, 2000 26 / 45.
_SPIN_ROUNDS = "7000"


def share_cores() -> None:
    """Make torch's threads sleep soon when they wait. Works only before torch is imported; the user's setting wins."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_ROUNDS)


def usable_threads(cgroup: Path = _CGROUP) -> int:
    """Return how many threads can run at once: processors that this process may use, less where its quota is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or no quota: "max"
        return allowed


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the memory that can still be taken, None where the system does not tell."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        left = int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text())
        return min(available, left)
    except (OSError, ValueError):  # no control groups, or no limit: "max"
        return available
