"""A resident kernel on the host: a session that runs plan records as the kernel does, one step each time it is looked at.

It works on the slots' own arena, and computes with the graphs backend's operations in torch. Rows' tokens come from
the records and the slots' fields, never from the host's view.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch

from megakernel_runtime.backends.graphs.frame import make_frame
from megakernel_runtime.device_state.fields import Field
from megakernel_runtime.interface import SamplingParams
from megakernel_runtime.kernels import words as w
from megakernel_runtime.program.slots import Segment, Slot
from megakernel_runtime.resident.fault import Fault
from megakernel_runtime.resident.session import NO_WORDS, KernelFault, Step

GREEDY = SamplingParams(temperature=0.0)
FAULT = Fault(3, "DOWN of layer 1", "a weight tile", 1, 0)


@dataclass(frozen=True)
class Record:
    kind: int
    plan: int
    decode: tuple[int, ...]
    prefill: tuple[tuple[int, ...], ...]
    lease: int
    pairs: np.ndarray
    clears: tuple[tuple[int, int], ...]


class Kernel:
    """`faults`: numbers of steps, over all launches, that end in a fault."""

    def __init__(self, parts, rows=8, faults=()):
        self.tables = parts.tables
        self.stepper = parts.runtime._stepper
        self.faults = set(faults)
        self.memory = SimpleNamespace(shape=SimpleNamespace(rows=rows))
        self.launches = {}
        self.resident = False
        self.n_stalls = 0  # looks until the next step ends
        self.n_cuts = 0  # records, not of `leave`, that told it to leave
        self.n_steps = 0
        self._records: deque[Record] = deque()
        self._command: Record | None = None
        self._lease = 0
        self._index = 0
        self._ended: list[Step] = []
        self._aborted = False
        self._clock_ns = 0

    # ---------------------------------------------------------------- what a session offers

    def write(self, kind, plan=0, *, decode=(), prefill=None, lease=1, pairs=NO_WORDS, clears=()):
        rows = () if prefill is None else tuple(map(tuple, prefill.tolist()))
        assert len(decode) + len(rows) <= self.memory.shape.rows
        self.n_cuts += kind == w.QUIT
        self._records.append(Record(kind, plan, tuple(decode), rows, lease, pairs.copy(), tuple(clears)))
        self.wake()

    def wake(self):
        self._settle()
        if not self.resident and self._records:
            reason = "wake" if self.launches else "start"
            self.launches[reason] = self.launches.get(reason, 0) + 1
            self.resident, self._index = True, 0

    def poll(self, timeout_s):
        if self.n_stalls:
            self.n_stalls -= 1
            return []
        if not self._ended:
            self.wake()
            self.advance()
        return self.unread()

    def unread(self):
        steps, self._ended = self._ended, []
        return steps

    def restart(self):
        self._records.clear()
        self.launches["fault"] = self.launches.get("fault", 0) + 1

    def leave(self):
        if self.resident:
            self._records.append(Record(w.QUIT, 0, (), (), 1, NO_WORDS, ()))
            while self.resident:
                self.advance()
        self._settle()
        self._records.clear()

    def resident_ns(self, now_ns):
        return 0

    # ---------------------------------------------------------------- what the kernel does

    def advance(self):
        """Run one step, or leave if there is none."""
        if not self.resident:
            return
        with torch.inference_mode():
            command = self._command or self._decide_late()
            self._command = None
            if command is None:
                self.resident = False
                return
            self.n_steps += 1
            if self.n_steps in self.faults:
                self._abort(command)
                return
            began_ns = self._tick()
            tokens = self._run(command)
            following = self._decide_early(command)
        same = following is not None and following.plan == command.plan
        step = Step(command.plan, self._index, len(tokens), not same, began_ns, self._tick(), tokens)
        self._index = self._index + 1 if same else 0
        self._command = following
        self._ended.append(step)

    def _decide_late(self):
        while self._records:
            record = self._records.popleft()
            arena = self.tables.state.arena
            for first, n in record.clears:
                arena[first : first + n] = 0
            for address, word in record.pairs.reshape(-1, 2).tolist():
                arena[address] = word
            if record.kind == w.QUIT:
                return None
            if record.kind == w.RUN:
                self._lease = record.lease - 1
                return record
        return None

    def _decide_early(self, command):
        if self._records:
            head = self._records[0]
            if head.kind == w.RUN and not len(head.pairs) and not head.clears:
                self._lease = head.lease - 1
                return self._records.popleft()
            return None
        if self._lease > 0 and self._goes_on(command):
            self._lease -= 1
            return replace(command, prefill=())
        self._lease = 0
        return None

    def _goes_on(self, command):
        fields = [self._fields(slot) for slot in command.decode]
        on = [f for f in fields if f[Field.LIVE] and f[Field.GENERATED] < f[Field.LIMIT]]
        return bool(on) and all(f[Field.POSITION] < f[Field.ROOM] for f in on)

    def _fields(self, slot):
        return self.tables.state.fields[slot].tolist()

    def _abort(self, command):
        for slot in (*command.decode, *(row[0] for row in command.prefill)):
            self.tables.state.fields[slot] = 77
        self._aborted, self.resident, self._lease = True, False, 0

    def _settle(self):
        if self._aborted:
            self._aborted = False
            raise KernelFault(FAULT)

    def _tick(self):
        self._clock_ns += 1_000
        return self._clock_ns

    def _run(self, command):
        """Compute a step; return its token records."""
        segments: list[Segment] = []
        row_of: list[int] = []
        for row, index in enumerate(command.decode):
            f = self._fields(index)
            if f[Field.LIVE] and f[Field.POSITION] < f[Field.ROOM]:
                at = f[Field.POSITION]
                segments.append(Segment(_slot(index, at, [f[Field.TOKEN]]), at, 1, samples=True))
                row_of.append(row)
        n_before = len(command.decode)
        for first in sorted({row[2] for row in command.prefill}):
            rows = [row for row in command.prefill if row[2] == first]
            index, at = rows[0][:2]
            tokens = [row[3] % w.SAMPLES for row in rows]
            samples = rows[-1][3] >= w.SAMPLES
            segments.append(Segment(_slot(index, at, tokens), at, len(rows), samples=samples))
            row_of.append(first + len(rows) - 1)
        records = np.zeros((n_before + len(command.prefill), w.TOKEN_WORDS), dtype=np.int32)
        records[:, w.OUT_SLOT] = -1
        if segments:
            sampling = [row for row, segment in zip(row_of, segments, strict=True) if segment.samples]
            frame = make_frame(segments, full=False)
            shape = self.stepper._executor.fit(frame.needs)
            self.stepper._send(frame, shape)
            self.stepper._executor.run(shape)
            for o, (row, segment) in enumerate(zip(sampling, frame.sampling, strict=True)):
                token, outcome = self.tables.result[o, :2].tolist()
                records[row, : w.OUT_LOGPROB] = segment.slot.index, token, outcome
        return records


def _slot(index, at, tokens):
    return Slot(index, [0] * at + tokens, 1, GREEDY, at)
