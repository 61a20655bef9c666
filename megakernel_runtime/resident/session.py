"""One resident kernel and its memory: launch, feed by plan records, read step records, park, wake, end.

All memory is allocated when the session begins; while the kernel is resident this module only reads and writes pinned
memory, asks events whether they are done, and copies small words on a stream of its own. Must not know: slots' meaning,
scheduling.
"""

# pyright: basic
# Triton is untyped.

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megakernel_runtime.interface import RuntimeFault
from megakernel_runtime.kernels import words as w
from megakernel_runtime.resident.fault import Fault, read_fault
from megakernel_runtime.resident.memory import DeviceMemory

SPIN_S = 20e-6  # how long to look again at once before sleeping between looks
END_WITHIN_S = 10.0
ROOM_WITHIN_S = 10.0

Words = NDArray[np.int32]
NO_WORDS: Words = np.zeros(0, dtype=np.int32)


class KernelFault(RuntimeFault):
    """A wait inside the kernel gave up; the kernel has left. Steps that were reported are sound."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the kernel did. `tokens` (n_rows, TOKEN_WORDS): see words.py."""

    plan: int
    index: int
    n_rows: int
    last: bool
    began_ns: int  # the GPU's clock
    ended_ns: int
    tokens: Words


class Session:
    """A kernel variant with its memory on one GPU. Not thread-safe."""

    def __init__(self, memory: DeviceMemory, *, park_ns: int) -> None:
        self.memory = memory
        self._park_ns = park_ns
        self._stream = torch.cuda.Stream(memory.device)
        self._done = torch.cuda.Event()
        self._launched = False
        self._next_step = 0  # of this launch: the next step record to read
        self._unread: list[Step] = []  # of earlier launches
        self._written = 0
        self._quit = 0  # how many plans were written when the kernel was told to leave
        self._packets: deque[tuple[int, int]] = deque()  # (plans written up to it, end of its pairs), not known taken
        self._packets_end = 0
        self._packets_free_from = 0
        self._launched_at_ns = 0
        self._resident_ns = 0  # of launches that are over
        self.launches: dict[str, int] = {}  # by reason

    # ---------------------------------------------------------------- feeding

    def write(
        self,
        kind: int,
        plan: int = 0,
        *,
        decode: Sequence[int] = (),
        prefill: Words | None = None,
        lease: int = 1,
        pairs: Words = NO_WORDS,
        clears: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Write one plan record and make sure that the kernel runs.

        Prefill rows (n, 4) are (slot, position, first row of the segment, token, with `words.SAMPLES` on the last
        known one). pairs (n, 2): words of the state arena and their values. clears: runs of the arena set to zero
        before. Waits while the ring is full; RuntimeFault if that takes long.
        """
        self._await_room(len(pairs))
        start = self._packets_end % w.PACKETS
        if len(pairs):
            ring = self.memory.packets
            first = min(len(pairs), w.PACKETS - start)
            ring[start : start + first] = pairs[:first]
            ring[: len(pairs) - first] = pairs[first:]
            self._packets_end += len(pairs)
        record = self.memory.plans[self._written % w.PLANS]
        n_prefill = 0 if prefill is None else len(prefill)
        record[: w.ROWS_AT] = (kind, plan, len(decode), n_prefill, lease, len(pairs), start, len(clears))
        rows = record[w.ROWS_AT : w.CLEARS_AT].reshape(-1, w.ROW_WORDS)
        rows[: len(decode), 0] = decode
        if prefill is not None:
            rows[len(decode) : len(decode) + n_prefill] = prefill
        if clears:
            record[w.CLEARS_AT : w.CLEARS_AT + 2 * len(clears)] = np.asarray(clears, dtype=np.int32).ravel()
        self._written += 1
        if kind == w.QUIT:
            self._quit = self._written
        self._packets.append((self._written, self._packets_end))
        self.memory.head[w.WRITTEN] = self._written  # x86 keeps stores in order: the record is seen before its count
        self.wake()

    def _taken(self) -> int:
        taken = int(self.memory.head[w.TAKEN])
        while self._packets and self._packets[0][0] <= taken:
            self._packets_free_from = self._packets.popleft()[1]
        return taken

    def _await_room(self, n_pairs: int) -> None:
        end = time.monotonic() + ROOM_WITHIN_S
        while (
            self._written - self._taken() >= w.PLANS
            or self._packets_end + n_pairs - self._packets_free_from > w.PACKETS
        ):
            self.wake()
            if time.monotonic() > end:
                raise RuntimeFault(f"the kernel has taken no plan for {ROOM_WITHIN_S:.0f} s")

    def wake(self) -> None:
        """Launch the kernel if it is not resident and has plans to run. Raises KernelFault if it left by a fault."""
        if self._launched and self._done.query():
            self._settle()
        if not self._launched and self._taken() < self._written:
            self._launch(self._taken(), "wake" if self.launches else "start")

    def restart(self) -> None:
        """After a KernelFault: forget all plans that were written, so that the next one launches the kernel anew."""
        self._unread += self._ended()
        self.memory.head[w.TAKEN] = self._written
        self.launches["fault"] = self.launches.get("fault", 0) + 1

    def _launch(self, done: int, reason: str) -> None:
        self.memory.steps[:] = 0
        self._next_step = 0
        self.launches[reason] = self.launches.get(reason, 0) + 1
        nonce = 0x5EED_0000_0000_0000 + 4 * sum(self.launches.values()) + (time.time_ns() % 2**30) * 2**10
        with torch.cuda.stream(self._stream):
            self.memory.empty()
            self.memory.launch(done, self._park_ns, nonce)
            self._done.record(self._stream)
        self._launched = True
        self._launched_at_ns = time.monotonic_ns()

    # ---------------------------------------------------------------- results

    def poll(self, timeout_s: float) -> list[Step]:
        """Return the steps that have ended and were not returned yet; wait up to `timeout_s` for the first.

        Raises KernelFault once, after all sound steps were returned.
        """
        begun = time.perf_counter()
        while not (steps := self.unread()):
            waited = time.perf_counter() - begun
            if waited > SPIN_S:
                self.wake()
                if waited > timeout_s:
                    break
                time.sleep(10e-6)
        return steps

    def unread(self) -> list[Step]:
        """Return the steps that have ended and were not returned yet."""
        if self._unread:
            steps, self._unread = self._unread, []
            return steps
        return self._ended()

    def _ended(self) -> list[Step]:
        steps: list[Step] = []
        while int((record := self.memory.steps[self._next_step % w.RESULTS])[w.SEQUENCE]) == self._next_step + 1:
            clocks = record[w.BEGAN_AT : w.ENDED_AT + 2].view(np.int64)
            n_rows = int(record[w.STEP_ROWS])
            steps.append(
                Step(
                    plan=int(record[w.STEP_PLAN]),
                    index=int(record[w.STEP_INDEX]),
                    n_rows=n_rows,
                    last=bool(record[w.STEP_LAST]),
                    began_ns=int(clocks[0]),
                    ended_ns=int(clocks[1]),
                    tokens=self.memory.tokens[self._next_step % w.RESULTS, :n_rows].copy(),
                )
            )
            self._next_step += 1
        return steps

    # ---------------------------------------------------------------- leaving

    @property
    def resident(self) -> bool:
        """Whether the kernel is on the GPU now."""
        return self._launched and not self._done.query()

    def leave(self) -> None:
        """Make the kernel leave and wait for it. Steps it has ended can still be read.

        Raises KernelFault if it left by a fault, RuntimeFault if it does not leave.
        """
        if self.resident:
            if self._quit <= self._taken():  # else it has been told already
                self.write(w.QUIT)
            end = time.perf_counter() + END_WITHIN_S
            while self.resident:
                if time.perf_counter() > end:
                    raise RuntimeFault(f"the kernel did not leave within {END_WITHIN_S:.0f} s")
        if self._launched:
            self._settle()
            self.memory.head[w.TAKEN] = self._written

    def _settle(self) -> None:
        """Take note that the kernel has left."""
        self._launched = False
        self._unread += self._ended()
        self._resident_ns += self._stay_ns()
        fault = read_fault(self.memory)
        if fault is not None:
            raise KernelFault(fault)

    def resident_ns(self, now_ns: int) -> int:
        """Return how long, up to `now_ns` on the host's clock, the kernel has been on the GPU in all."""
        if not self._launched:
            return self._resident_ns
        if self._done.query():
            return self._resident_ns + self._stay_ns()
        return self._resident_ns + now_ns - self._launched_at_ns

    def _stay_ns(self) -> int:
        """Return how long the launch that is over lasted, by the GPU's clock."""
        began, left = self.memory.head[w.BEGAN_HEAD : w.LEFT_HEAD + 2].view(np.int64)
        return max(int(left - began), 0)
