"""Plans that are submitted and not over: which sequences they name, and how far each sequence may be by now.

Knows the runtime's order of plans and leases (megakernel_runtime.interface). Must not know: policy, pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from megakernel_runtime.interface import StepPlan, StepResult
from server.scheduling.requests import Sequence


@dataclass(slots=True)
class Flight:
    """One submitted plan."""

    plan: StepPlan
    sequences: dict[int, Sequence]  # by slot: a slot may go to another sequence while an earlier plan is under way
    decoding: tuple[Sequence, ...]  # give a token in each step
    sampling: tuple[Sequence, ...]  # prefills that reach their end: give a token in the first step
    steps_done: int = 0

    @property
    def steps_left(self) -> int:
        """Steps that it may still run."""
        return self.plan.lease_steps - self.steps_done


class Flights:
    """The unfinished plans, in order. Keeps `out_max` and `out_min` of the sequences that they name."""

    def __init__(self, max_plans: int) -> None:
        self._max_plans = max_plans
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        """How many plans are unfinished."""
        return len(self._flights)

    @property
    def full(self) -> bool:
        """Whether no further plan may be submitted now."""
        return len(self._flights) >= self._max_plans

    @property
    def newest(self) -> Flight | None:
        """The plan submitted last, if it is not over."""
        return self._flights[-1] if self._flights else None

    def add(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> None:
        """Record a plan; `sequences` are those of its rows, by slot."""
        decoding = tuple(sequences[slot] for slot in plan.decode)
        prefilled = (sequences[row.slot] for row in plan.prefill)
        sampling = tuple(sequence for sequence in prefilled if not sequence.prefilling)
        for sequence in decoding:
            sequence.out_max += plan.lease_steps
            sequence.out_min += 1
        for sequence in sampling:
            sequence.out_max += 1
            sequence.out_min += 1
        self._flights.append(Flight(plan, dict(sequences), decoding, sampling))

    def step(self, result: StepResult) -> tuple[Flight, bool]:
        """Take note of a step; return its plan, and whether any plan is over by it (earlier ones are, too)."""
        ended = False
        while self._flights and self._flights[0].plan.plan_id < result.plan_id:
            self._end(self._flights.popleft())
            ended = True
        assert self._flights, f"result of plan {result.plan_id}, which is not under way"
        flight = self._flights[0]
        assert flight.plan.plan_id == result.plan_id, f"result of plan {result.plan_id} before it was submitted"
        first = flight.steps_done == 0
        flight.steps_done += 1
        for sequence in flight.decoding:
            sequence.out_max -= 1
        if first:
            for sequence in flight.decoding:
                sequence.out_min -= 1
            for sequence in flight.sampling:
                sequence.out_max -= 1
                sequence.out_min -= 1
        if result.last:
            self._end(self._flights.popleft())
        return flight, ended or result.last

    def _end(self, flight: Flight) -> None:
        """Take back what the plan might still have given. Every plan has run a step before it ends."""
        assert flight.steps_done, f"plan {flight.plan.plan_id} ended without a step"
        for sequence in flight.decoding:
            sequence.out_max -= flight.steps_left
