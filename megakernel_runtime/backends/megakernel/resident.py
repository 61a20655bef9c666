"""Plans on the resident kernel: from plans to its records, from its steps to results.

The kernel moves slots on by itself; the host's view follows when steps are reported. Must not know: requests, tensors,
which plans are not for the kernel.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megakernel_runtime.backends.megakernel.clock import DeviceClock
from megakernel_runtime.device_state.fields import Outcome
from megakernel_runtime.device_state.state import SlotState
from megakernel_runtime.interface import (
    FinishReason,
    PrefillRow,
    RuntimeFault,
    SampledToken,
    StepPlan,
    StepResult,
)
from megakernel_runtime.kernels import words as w
from megakernel_runtime.program.slots import Segment, Slot, SlotTable
from megakernel_runtime.resident.session import KernelFault, Session, Step, Words

_FINISH = {Outcome.RUNS.value: None, Outcome.STOP.value: FinishReason.STOP, Outcome.LENGTH.value: FinishReason.LENGTH}
_NO_ROWS: Words = np.zeros((0, w.ROW_WORDS), dtype=np.int32)


@dataclass(slots=True)
class _Flight:
    """A plan that the kernel was given and has not finished."""

    plan: StepPlan
    decode: tuple[Slot, ...]
    prefill: tuple[Segment, ...]
    rows: Words  # of the prefill segments, as the kernel reads them
    done: int = 0  # steps
    by_row: dict[int, Slot] = field(default_factory=dict[int, Slot])  # by slot index

    @property
    def runs(self) -> bool:
        """Whether there is anything left to compute."""
        return bool(self.decode or (self.prefill and not self.done))

    @property
    def kind(self) -> str:
        """Which telemetry its next step counts as."""
        if not self.prefill or self.done:
            return "decode"
        return "mixed" if self.decode else "prefill"


class ResidentRunner:
    """Feeds one session. Slots and their device state are shared with whoever else runs steps, in turns."""

    def __init__(self, session: Session, slots: SlotTable, state: SlotState) -> None:
        self._session = session
        self._slots = slots
        self._state = state
        self._clock = DeviceClock()
        self._flights: deque[_Flight] = deque()
        self._cut = False  # the kernel was told to leave
        self.steps: Counter[tuple[int, str]] = Counter()
        self.context_tokens = 0  # that steps have read, over all rows
        self.n_steps = 0

    @property
    def busy(self) -> bool:
        """Whether plans are unfinished."""
        return bool(self._flights)

    # ---------------------------------------------------------------- plans

    def submit(self, plan: StepPlan) -> None:
        """Apply a plan to the slots and give its steps to the kernel. RuntimeFault if it breaks the contract."""
        self._cut = False
        flying = {slot.index for flight in self._flights for slot in flight.by_row.values()}
        for slot in plan.releases:
            self._slots.release(slot)
        for admit in plan.admits:
            self._slots.admit(admit)
        for grant in plan.grants:
            self._slots.grant(grant)
        segments = tuple(filter(None, map(self._slots.prefill, plan.prefill)))
        decode = [self._slots.taken(index) for index in plan.decode]
        for slot in decode:
            if slot.index not in flying:  # else the host does not know yet how far the slot will be
                self._slots.decode(slot.index)
        for segment in segments:
            self._slots.advance(segment, None)
        living = tuple(slot for slot in decode if slot.finish is None)
        flight = _Flight(plan, living, segments, _rows(segments, len(living)))
        flight.by_row = {slot.index: slot for slot in (*living, *(segment.slot for segment in segments))}
        self._flights.append(flight)
        self._write(flight)

    def _write(self, flight: _Flight) -> None:
        """Give the kernel what of a plan is not done."""
        self._state.sync(list(flight.by_row.values()))
        update = self._state.take()
        pairs = np.stack((update.addresses, update.words), axis=1)
        first = flight.done == 0
        if not flight.runs:
            self._session.write(w.APPLY, pairs=pairs, clears=update.clears)
            return
        self._session.write(
            w.RUN,
            flight.plan.plan_id & 0x7FFFFFFF,
            decode=[slot.index for slot in flight.decode],
            prefill=flight.rows if first else None,
            lease=flight.plan.lease_steps - flight.done if flight.decode else 1,
            pairs=pairs,
            clears=update.clears,
        )

    def cut(self) -> None:
        """Make the kernel leave after the step that it is in, whatever is left of the lease."""
        if self._session.resident and not self._cut:
            self._cut = True
            self._session.write(w.QUIT)

    # ---------------------------------------------------------------- results

    def poll(self, timeout_s: float) -> list[StepResult]:
        """Return results not yet returned; wait up to `timeout_s` for the first. Raises KernelFault, RuntimeFault."""
        results = self._without_rows()
        if results or not self._flights:
            return results
        for step in self._session.poll(timeout_s):
            results += self._land(step)
            results += self._without_rows()
        return results

    def _without_rows(self) -> list[StepResult]:
        """Return the results of plans that run nothing, when their turn has come."""
        results: list[StepResult] = []
        while self._flights and not self._flights[0].runs:
            flight, now = self._flights.popleft(), time.monotonic_ns()
            results.append(StepResult(flight.plan.plan_id, flight.done, True, (), 0, now, now))
        return results

    def _land(self, step: Step) -> list[StepResult]:
        flight = self._flights[0]
        if step.plan != flight.plan.plan_id & 0x7FFFFFFF:
            raise RuntimeFault(f"the kernel reported a step of plan {step.plan}, expected {flight.plan.plan_id}")
        self._clock.observe(step.ended_ns, time.monotonic_ns())
        tokens = tuple(self._token(flight, row) for row in step.tokens if row[w.OUT_SLOT] >= 0)
        prefilled = flight.prefill if flight.done == 0 else ()
        sampled_by_prefill = sum(segment.samples for segment in prefilled)
        n_rows = len(tokens) - sampled_by_prefill + sum(segment.count for segment in prefilled)
        self._account(flight, n_rows)
        result = StepResult(
            flight.plan.plan_id,
            flight.done,
            step.last,
            tokens,
            n_rows,
            self._clock.on_host(step.began_ns),
            self._clock.on_host(step.ended_ns),
        )
        flight.done += 1
        if step.last:
            self._flights.popleft()
        return [result]

    def _token(self, flight: _Flight, row: Words) -> SampledToken:
        slot = flight.by_row[int(row[w.OUT_SLOT])]
        token = int(row[w.OUT_TOKEN])
        segment = Segment(slot, len(slot.tokens) - 1, 1, samples=True)
        self._slots.advance(segment, token)
        finish = slot.finish = _FINISH[int(row[w.OUT_OUTCOME])]
        wanted = slot.sampling.top_logprobs
        if wanted is None:
            return SampledToken(slot.index, token, finish=finish)
        floats = row.view(np.float32)
        ids = row[w.TOP_IDS_AT : w.TOP_IDS_AT + wanted].tolist()
        values = floats[w.TOP_LOGPROBS_AT : w.TOP_LOGPROBS_AT + wanted].tolist()
        top = tuple((i, value) for i, value in zip(ids, values, strict=True) if i >= 0)
        return SampledToken(slot.index, token, float(floats[w.OUT_LOGPROB]), top, finish)

    def _account(self, flight: _Flight, n_rows: int) -> None:
        self.n_steps += 1
        if n_rows:
            self.steps[self._session.memory.shape.rows, flight.kind] += 1
        self.context_tokens += sum(slot.computed for slot in flight.by_row.values())

    # ---------------------------------------------------------------- faults

    def drain(self) -> list[StepResult]:
        """Return the results of sound steps that are left after a KernelFault."""
        results: list[StepResult] = []
        for step in self._session.unread():
            results += self._land(step)
        return results

    def recover(self) -> None:
        """After a KernelFault: write all slots as the host knows them, and give the kernel what is unfinished anew."""
        self._session.restart()
        self._forget_the_gone()
        self._state.forget()
        for flight in self._flights:
            self._write(flight)

    def give_up(self) -> list[tuple[StepPlan, int]]:
        """After a KernelFault: return what is left of the unfinished plans, oldest first, for somebody else to run, and
        how many steps of each are done. What they admit, grant and release was done.
        """
        self._forget_the_gone()
        self._state.forget()
        left: list[tuple[StepPlan, int]] = []
        for flight in reversed(self._flights):
            prefill = () if flight.done else flight.prefill
            for segment in prefill:
                segment.slot.computed = segment.start
            rows = tuple(PrefillRow(s.slot.index, s.start, s.count) for s in prefill)
            decode = tuple(slot.index for slot in flight.decode)
            lease = max(flight.plan.lease_steps - flight.done, 1)
            plan = StepPlan(flight.plan.plan_id, prefill=rows, decode=decode, lease_steps=lease)
            left.append((plan, flight.done))
        self._flights.clear()
        return left[::-1]

    def _forget_the_gone(self) -> None:
        """Drop rows of sequences that have ended or left their slots from the unfinished plans."""
        for flight in self._flights:
            flight.decode = tuple(s for s in flight.decode if self._slots.holds(s) and s.finish is None)
            flight.prefill = tuple(s for s in flight.prefill if self._slots.holds(s.slot))
            flight.rows = _rows(flight.prefill, len(flight.decode))
            flight.by_row = {i: slot for i, slot in flight.by_row.items() if self._slots.holds(slot)}


def _rows(segments: Sequence[Segment], n_before: int) -> Words:
    """Return the prefill rows of a step that has `n_before` decode rows; see words.py."""
    rows: list[tuple[int, int, int, int]] = []
    for segment in segments:
        first = n_before + len(rows)
        for i in range(segment.count):
            position = segment.start + i
            last = segment.samples and i == segment.count - 1
            token = segment.slot.tokens[position] | (w.SAMPLES if last else 0)
            rows.append((segment.slot.index, position, first, token))
    return np.array(rows, dtype=np.int32) if rows else _NO_ROWS


__all__ = ["KernelFault", "ResidentRunner"]
