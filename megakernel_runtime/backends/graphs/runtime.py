"""The runtimes `graphs` and `eager`: plans in, steps on the device several ahead of their results, results out.

The host knows beforehand what each step does, all but its tokens: those stay on the device, which feeds them to the
next step. So steps are launched before the results of earlier ones are there; rows of a slot that turns out to have
ended are skipped by the device. Must not know: requests, text, kernels.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megakernel_runtime.backends.graphs.ledger import Ledger
from megakernel_runtime.backends.graphs.readback import Landed
from megakernel_runtime.backends.graphs.stepper import Launch, Stepper
from megakernel_runtime.backends.plan_runner import PlanRunner
from megakernel_runtime.device_state.fields import Outcome
from megakernel_runtime.interface import (
    Capacity,
    DeviceInfo,
    FinishReason,
    RuntimeFault,
    SampledToken,
    StepPlan,
    StepResult,
    Telemetry,
)
from megakernel_runtime.program.reference.untyped import floats
from megakernel_runtime.program.slots import Choice, Segment, SlotTable

AHEAD_NS = 2_000_000  # so much work is kept queued on the device while the host does other things
LEAST_AHEAD_STEPS = 2
MOST_AHEAD_STEPS = 8
_LOOK_EVERY_S = 2e-5
_UNKNOWN = Choice(-1)  # stands for a token that only the device knows
_FINISH = {Outcome.RUNS.value: None, Outcome.STOP.value: FinishReason.STOP, Outcome.LENGTH.value: FinishReason.LENGTH}


@dataclass(frozen=True, slots=True)
class _Flight:
    """A result to come: all that was known of it when its step was launched. Without a launch, it is complete."""

    result: StepResult
    launch: Launch | None
    kind: str  # decode | prefill | mixed


class GraphsRuntime:
    """A model on a GPU. Steps are launched in `poll`, by the calling thread."""

    def __init__(
        self,
        stepper: Stepper,
        capacity: Capacity,
        info: DeviceInfo,
        *,
        step_bytes: int,
        token_bytes: int,
        slots: SlotTable,
    ) -> None:
        """`step_bytes` are read by each step, `token_bytes` for each token of each row's context."""
        self.capacity = capacity
        self.info = info
        self._stepper = stepper
        self._bytes = (step_bytes, token_bytes)
        self._slots = slots
        self._runner = PlanRunner(capacity, self._slots, self._launch)
        self._plans: deque[StepPlan] = deque()  # whose last result was not returned, oldest first
        self._launched: Launch | None = None  # by the runner's current step
        self._flights: deque[_Flight] = deque()
        self._n_flying = 0  # flights with a launch
        self._step_ns = 0.0  # of late, on average; 0: not known
        self._ledger = Ledger(time.monotonic_ns())
        self._steps: Counter[tuple[int, str]] = Counter()
        self._kernels: Counter[tuple[str, str]] = Counter()
        self._bytes_streamed = 0
        self._closed = False

    # ---------------------------------------------------------------- Runtime

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises RuntimeFault if it breaks the contract of plans."""
        self._check_open()
        self._runner.submit(plan)
        if not self._plans:
            self._ledger.work(time.monotonic_ns())
        self._plans.append(plan)

    def poll(self, timeout_s: float) -> Sequence[StepResult]:
        """Launch steps ahead, then return the results that are there; wait for the first if any is to come.

        Raises RuntimeFault.
        """
        self._check_open()
        try:
            self._launch_ahead()
            return self._collect(time.monotonic() + timeout_s)
        except (RuntimeError, MemoryError) as error:  # torch's own
            raise RuntimeFault(f"a step failed: {error}") from error

    def telemetry(self) -> Telemetry:
        """Return counters. Launches are the kernels of captured steps. A device without plans has parked."""
        self._ledger.settle(time.monotonic_ns())
        return Telemetry(
            compute_ns=self._ledger.compute_ns,
            wait_host_ns=self._ledger.wait_host_ns,
            parked_ns=self._ledger.parked_ns,
            launches=dict(self._kernels),
            steps=dict(self._steps),
            bytes_streamed=self._bytes_streamed,
        )

    def close(self) -> None:
        """Give the device's memory back."""
        if not self._closed:
            self._closed = True
            self._flights.clear()
            self._stepper.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeFault("the runtime is closed")

    # ---------------------------------------------------------------- launching

    def _launch_ahead(self) -> None:
        while self._n_flying < self._wanted_ahead():
            results = self._runner.step()
            if not results:
                return
            for result in results:  # the first may close a plan, the last is of the step, if any rows were left to run
                launch = self._launched if result is results[-1] else None
                self._flights.append(_Flight(result, launch, self._kind(result, launch)))
            self._n_flying += self._launched is not None
            self._launched = None

    def _wanted_ahead(self) -> int:
        """Return how many steps to keep launched: enough work to bridge the host's absence, but no more than a share of
        the lease, so that a plan that is submitted meanwhile still finds something to end.
        """
        in_time = AHEAD_NS // self._step_ns + 1 if self._step_ns else 0
        newest = self._flights[-1].result.plan_id if self._flights else 0
        lease = next((plan.lease_steps for plan in self._plans if plan.plan_id == newest), 1)
        return int(max(LEAST_AHEAD_STEPS, min(in_time, lease // 4, MOST_AHEAD_STEPS)))

    def _launch(self, segments: Sequence[Segment]) -> list[Choice]:
        """Run one step over `segments` on the device, and take the host's view of the slots to where it leads."""
        self._launched = self._stepper.launch(segments)
        for segment in segments:
            self._slots.advance(segment, _UNKNOWN.token if segment.samples else None)
        return [_UNKNOWN] * len(self._launched.sampling)

    def _kind(self, result: StepResult, launch: Launch | None) -> str:
        plan = next(plan for plan in self._plans if plan.plan_id == result.plan_id)
        ran = set[int]() if launch is None else {segment.slot.index for segment in launch.segments}
        prefilled = result.step_index == 0 and any(row.slot in ran for row in plan.prefill)
        decoded = not ran.isdisjoint(plan.decode)
        return "mixed" if prefilled and decoded else "prefill" if prefilled else "decode"

    # ---------------------------------------------------------------- landing

    def _collect(self, deadline: float) -> list[StepResult]:
        results: list[StepResult] = []
        waited = False
        while self._flights:
            head = self._flights[0]
            if head.launch is not None and not head.launch.ticket.is_done():
                if results or time.monotonic() >= deadline:
                    break
                waited = True
                time.sleep(_LOOK_EVERY_S)
                continue
            self._flights.popleft()
            result = head.result
            if head.launch is not None:
                self._n_flying -= 1
                result = self._land(head, head.launch, head.launch.ticket.read(waited=waited))
            results.append(result)
            if result.last:
                self._plans.popleft()
                if not self._plans:
                    self._ledger.rest()
        return results

    def _land(self, flight: _Flight, launch: Launch, landed: Landed) -> StepResult:
        """Return the result of a step, now that its tokens are known; end the slots that have finished by it."""
        tokens: list[SampledToken] = []
        skipped: set[int] = set()
        words: list[list[int]] = landed.result.tolist()
        for o, (segment, (token, outcome, _, _)) in enumerate(zip(launch.sampling, words, strict=True)):
            slot = segment.slot
            if outcome == Outcome.SKIPPED:
                skipped.add(slot.index)
                continue
            finish = _FINISH[outcome]
            slot.tokens[segment.end] = token
            slot.finish = finish or slot.finish  # the host may have foreseen the end of a later step
            if slot.sampling.top_logprobs is None:
                tokens.append(SampledToken(slot.index, token, finish=finish))
            else:
                tokens.append(_with_logprobs(o, segment, token, landed, finish))
        ran = [s for s in launch.segments if s.slot.index not in skipped] if skipped else launch.segments
        self._account(flight, launch, landed, ran)
        return replace(
            flight.result,
            tokens=tuple(tokens),
            n_rows=sum(segment.count for segment in ran),
            started_ns=landed.started_ns,
            ended_ns=landed.ended_ns,
        )

    def _account(self, flight: _Flight, launch: Launch, landed: Landed, ran: Sequence[Segment]) -> None:
        spent_ns = landed.ended_ns - landed.started_ns
        self._step_ns += (spent_ns - self._step_ns) * (0.2 if self._step_ns else 1.0)
        self._ledger.step(landed.started_ns, landed.ended_ns)
        if ran:
            step_bytes, token_bytes = self._bytes
            self._steps[launch.shape.rows, flight.kind] += 1
            self._bytes_streamed += step_bytes + token_bytes * sum(segment.end for segment in ran)
        if launch.n_kernels:
            self._kernels[launch.shape.variant, "step"] += launch.n_kernels


def _with_logprobs(o: int, segment: Segment, token: int, landed: Landed, finish: FinishReason | None) -> SampledToken:
    """Return a token with what output `o` says of its probability."""
    wanted = segment.slot.sampling.top_logprobs or 0
    logprob = float(landed.result[o, 2:3].view("float32")[0])
    pairs = zip(landed.top_ids[o, :wanted].tolist(), floats(landed.top_logprobs[o, :wanted]), strict=True)
    top = tuple((i, value) for i, value in pairs if i >= 0)
    return SampledToken(segment.slot.index, token, logprob, top, finish)
