"""What plans mean, for backends whose steps the host starts: order, leases, skipped slots, results, time accounts.

A backend gives one function that runs the rows of one step; everything that interface.py says of plans is done here.
Must not know: tensors, devices, models.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from megakernel_runtime.interface import Capacity, RuntimeFault, SampledToken, StepPlan, StepResult, Telemetry
from megakernel_runtime.program.slots import Choice, Segment, SlotTable

# Runs the rows of segments of distinct slots, advances the slots, and returns a choice for each that samples, in order.
RunRows = Callable[[Sequence[Segment]], Sequence[Choice]]


class PlanRunner:
    """Plans in, one step at a time, results out. Breaches of the contract are RuntimeFault, like those of slots."""

    def __init__(self, capacity: Capacity, slots: SlotTable, run_rows: RunRows) -> None:
        self._capacity = capacity
        self._slots = slots
        self._run_rows = run_rows
        self._queue: deque[StepPlan] = deque()
        self._current: StepPlan | None = None
        self._steps_done = 0  # of the current plan
        self._last_plan_id = 0
        self._started_ns = time.monotonic_ns()
        self._compute_ns = 0
        self._step_counts: dict[tuple[int, str], int] = {}

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan."""
        unfinished = len(self._queue) + (self._current is not None)
        check_plan(plan, self._capacity, self._last_plan_id, unfinished)
        self._last_plan_id = plan.plan_id
        self._queue.append(plan)

    def step(self) -> list[StepResult]:
        """Run one step of the plan that is due, and return its result; nothing if no plan is unfinished.

        A plan that was superseded since its last step is closed before, by a last result without rows.
        """
        results: list[StepResult] = []
        started_ns = time.monotonic_ns()
        if self._current is not None and self._queue and self._steps_done:
            results.append(self._result(self._current, (), 0, started_ns, last=True))
        plan = self._due()
        if plan is None:
            return results
        segments = self._rows(plan)
        choices = iter(self._run_rows(segments) if segments else ())
        tokens = tuple(_sampled(segment, next(choices)) for segment in segments if segment.samples)
        n_rows = sum(segment.count for segment in segments)
        self._account(plan, segments, n_rows, time.monotonic_ns() - started_ns)
        results.append(self._result(plan, tokens, n_rows, started_ns, last=self._ends(plan)))
        return results

    def _result(
        self, plan: StepPlan, tokens: tuple[SampledToken, ...], n_rows: int, started_ns: int, *, last: bool
    ) -> StepResult:
        """Return the result of a step that is over; after the last one, no plan is current."""
        result = StepResult(plan.plan_id, self._steps_done, last, tokens, n_rows, started_ns, time.monotonic_ns())
        self._steps_done += 1
        if last:
            self._current = None
        return result

    def telemetry(self, bytes_streamed: int) -> Telemetry:
        """Return counters: time in steps is computing, all other time since the start is waiting for the host."""
        wall_ns = time.monotonic_ns() - self._started_ns
        return Telemetry(
            compute_ns=self._compute_ns,
            wait_host_ns=wall_ns - self._compute_ns,
            steps=dict(self._step_counts),
            bytes_streamed=bytes_streamed,
        )

    def _due(self) -> StepPlan | None:
        """Return the plan to run a step of. Starting one applies its releases, admissions and grants, in this order."""
        if self._current is None and self._queue:
            plan = self._current = self._queue.popleft()
            self._steps_done = 0
            for slot in plan.releases:
                self._slots.release(slot)
            for admit in plan.admits:
                self._slots.admit(admit)
            for grant in plan.grants:
                self._slots.grant(grant)
        return self._current

    def _rows(self, plan: StepPlan) -> list[Segment]:
        prefill = plan.prefill if self._steps_done == 0 else ()
        segments = [*map(self._slots.prefill, prefill), *map(self._slots.decode, plan.decode)]
        return [segment for segment in segments if segment is not None]

    def _ends(self, plan: StepPlan) -> bool:
        """Whether the current plan gives no further step: its lease is over, another plan waits, or pages ran out."""
        if self._steps_done + 1 >= plan.lease_steps or self._queue:
            return True
        running = [slot for slot in plan.decode if not self._slots.is_finished(slot)]
        return not running or not all(map(self._slots.has_room, running))

    def _account(self, plan: StepPlan, segments: Sequence[Segment], n_rows: int, spent_ns: int) -> None:
        self._compute_ns += spent_ns
        if not segments:
            return
        prefilled = self._steps_done == 0 and bool(plan.prefill)
        decoded = {segment.slot.index for segment in segments} & set(plan.decode)
        kind = "mixed" if prefilled and decoded else "prefill" if prefilled else "decode"
        bucket = max(8, 1 << (n_rows - 1).bit_length())
        self._step_counts[bucket, kind] = self._step_counts.get((bucket, kind), 0) + 1


def check_plan(plan: StepPlan, capacity: Capacity, last_plan_id: int, unfinished: int) -> None:
    """RuntimeFault if a plan breaks the contract, as far as that shows without the slots."""
    if unfinished >= capacity.max_plans_ahead:
        raise RuntimeFault(f"{unfinished} plans are unfinished; no more may be submitted until one ends")
    if plan.plan_id != last_plan_id + 1:
        raise RuntimeFault(f"plan {plan.plan_id} was submitted after plan {last_plan_id}")
    if not 1 <= plan.lease_steps <= capacity.max_lease_steps:
        raise RuntimeFault(f"a lease of {plan.lease_steps} steps; 1 to {capacity.max_lease_steps} are possible")
    named = [row.slot for row in plan.prefill] + list(plan.decode)
    if len(set(named)) < len(named):
        raise RuntimeFault(f"plan {plan.plan_id} names a slot twice: {sorted(named)}")
    n_rows = sum(row.count for row in plan.prefill) + len(plan.decode)
    if n_rows > capacity.max_step_tokens:
        raise RuntimeFault(f"plan {plan.plan_id} has {n_rows} rows; {capacity.max_step_tokens} fit into a step")


def _sampled(segment: Segment, choice: Choice) -> SampledToken:
    slot = segment.slot
    return SampledToken(slot.index, choice.token, choice.logprob, choice.top, slot.finish)
