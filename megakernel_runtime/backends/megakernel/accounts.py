"""Where the GPU's time went, from the clocks inside the kernel. Must not know: plans, steps."""

# pyright: basic
# torch.cuda is untyped.

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from megakernel_runtime.kernels import words as w
from megakernel_runtime.resident.session import Session

_COPY_WITHIN_S = 0.01
# Time on the GPU that no CTA has accounted for: less is of the step that is running, more a wait for the host
_LONG_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class States:
    """Nanoseconds since load, averaged over SMs; they sum to the wall time, less what is not accounted for yet."""

    compute_ns: int = 0
    wait_dependency_ns: int = 0
    wait_memory_ns: int = 0
    wait_host_ns: int = 0
    parked_ns: int = 0


class Accounts:
    """Reads the accounts of a session's kernel, resident or not, without disturbing it: a copy on its own stream."""

    def __init__(self, session: Session, now_ns: int) -> None:
        self._session = session
        self._began_ns = now_ns
        self._source = session.memory.parts["accounts"]
        self._copy = torch.zeros(self._source.shape, dtype=torch.int64, pin_memory=True)
        self._stream = torch.cuda.Stream(self._source.device)
        self._copied = torch.cuda.Event()
        self._last = States()

    def by_sm(self) -> np.ndarray:
        """Return each CTA's accounts, (G, ACCOUNTS) i64, now; the last known ones if the copy takes long."""
        with torch.cuda.stream(self._stream):
            self._copy.copy_(self._source, non_blocking=True)
            self._copied.record(self._stream)
        end = time.monotonic() + _COPY_WITHIN_S
        while not self._copied.query() and time.monotonic() < end:
            pass
        return self._copy.numpy()

    def read(self, now_ns: int, elsewhere_ns: int) -> States:
        """Return the states at `now_ns`. `elsewhere_ns`: the GPU computed so long outside the kernel."""
        resident_ns = self._session.resident_ns(now_ns)
        sums = self.by_sm().sum(axis=0)
        grid = len(self._copy)
        total = int(sums[w.TOTAL])
        if total == 0:
            return self._settle(States(elsewhere_ns, 0, 0, 0, now_ns - self._began_ns - elsewhere_ns))
        ns_per_cycle = int(sums[w.NANOSECONDS]) / total / grid
        dependency, memory, host = (int(sums[i] * ns_per_cycle) for i in (w.DEPENDENCY, w.MEMORY, w.HOST))
        compute = int(total * ns_per_cycle) - dependency - memory - host
        unaccounted = resident_ns - int(total * ns_per_cycle)
        if unaccounted > _LONG_NS:
            host += unaccounted
        parked = now_ns - self._began_ns - resident_ns - elsewhere_ns
        return self._settle(States(compute + elsewhere_ns, dependency, memory, host, parked))

    def _settle(self, states: States) -> States:
        """Return states that never fall: measured shares are rounded."""
        self._last = States(
            *(max(getattr(states, name), getattr(self._last, name)) for name in States.__dataclass_fields__)
        )
        return self._last
