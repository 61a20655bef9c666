"""The runtime `megakernel`: small steps on the resident kernel, large ones on the graphs backend, one state for both.

Only one of them has unfinished plans at a time. A plan for the other waits until the first is done, which is soon: the
kernel is told to leave after the step that it is in. The kernel's first fault is answered by launching it anew, from
what the host knows of every slot; after the second the graphs backend runs everything. Must not know: requests, text,
tensors.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megakernel_runtime.backends.graphs.runtime import GraphsRuntime
from megakernel_runtime.backends.megakernel.accounts import Accounts
from megakernel_runtime.backends.megakernel.resident import ResidentRunner
from megakernel_runtime.backends.plan_runner import check_plan
from megakernel_runtime.interface import (
    Capacity,
    DeviceInfo,
    RuntimeFault,
    SamplingParams,
    StepPlan,
    StepResult,
    Telemetry,
)
from megakernel_runtime.resident.session import KernelFault, Session

logger = logging.getLogger(__name__)

GRAPHS_LEASE_STEPS = 4  # so that the kernel need not wait long for its turn
FAULTS = 2  # of the kernel, then graphs takes over
_POLL_S = 0.001


@dataclass(slots=True)
class _Waiting:
    """A plan that was given to neither executor: how many of its steps are done, and whose it is."""

    plan: StepPlan
    done: int
    resident: bool


def is_plain(sampling: SamplingParams) -> bool:
    """Whether the kernel's sampler can choose a slot's tokens: greedily, without penalties, masks or logprobs."""
    p = sampling
    penalised = p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty
    masked = p.logit_bias or p.allowed_token_ids or (p.min_tokens and p.stop_token_ids)
    return p.greedy and p.top_logprobs is None and not penalised and not masked


class MegakernelRuntime:
    """A model on a GPU."""

    def __init__(
        self,
        session: Session,
        runner: ResidentRunner,
        graphs: GraphsRuntime,
        capacity: Capacity,
        info: DeviceInfo,
        accounts: Accounts,
        *,
        max_rows: int,
        chunks: bool,
        step_bytes: int,
        token_bytes: int,
        kernels_per_step: int,
    ) -> None:
        """`max_rows`: of a step of the kernel. `chunks`: it takes several rows of one sequence.

        `step_bytes` are read by each step, `token_bytes` for each token of each row's context. `kernels_per_step`:
        launches that a step would take otherwise.
        """
        self.capacity = capacity
        self.info = info
        self._session = session
        self._runner = runner
        self._graphs = graphs
        self._max_rows = max_rows
        self._chunks = chunks
        self._bytes = (step_bytes, token_bytes)
        self._kernels_per_step = kernels_per_step
        self._queue: deque[_Waiting] = deque()  # given to neither yet
        self._plain: dict[int, bool] = {}  # by slot: whether the kernel's sampler can choose its tokens
        self._on_graphs: deque[tuple[int, int]] = deque()  # unfinished plans' ids, steps done before
        self._results: list[StepResult] = []  # not returned yet
        self._graphs_plan_id = 0
        self._n_unfinished = 0
        self._last_plan_id = 0
        self._faults = 0
        self._fallbacks: Counter[str] = Counter()
        self._accounts = accounts
        self._closed = False

    # ---------------------------------------------------------------- Runtime

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises RuntimeFault if it breaks the contract of plans."""
        self._check_open()
        check_plan(plan, self.capacity, self._last_plan_id, self._n_unfinished)
        self._last_plan_id = plan.plan_id
        self._n_unfinished += 1
        self._plain |= {admit.slot: is_plain(admit.sampling) for admit in plan.admits}
        self._queue.append(_Waiting(plan, 0, self._faults < FAULTS and self._is_resident(plan)))
        self._dispatch()

    def poll(self, timeout_s: float) -> Sequence[StepResult]:
        """Return results; wait for the first if any is to come. Raises RuntimeFault."""
        self._check_open()
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            self._collect(0.0 if self._results else min(left_s, _POLL_S) if self._queue else left_s)
            self._dispatch()
            if self._results or not self._n_unfinished or time.monotonic() >= deadline:
                results, self._results = self._results, []
                self._n_unfinished -= sum(result.last for result in results)
                return results

    def telemetry(self) -> Telemetry:
        """Return counters. Launches are the kernel's own, by reason, and the kernels of captured steps."""
        graphs = self._graphs.telemetry()
        states = self._accounts.read(time.monotonic_ns(), graphs.compute_ns)
        launches = {("resident", reason): n for reason, n in self._session.launches.items()}
        step_bytes, token_bytes = self._bytes
        streamed = self._runner.n_steps * step_bytes + self._runner.context_tokens * token_bytes
        return Telemetry(
            compute_ns=states.compute_ns,
            wait_dependency_ns=states.wait_dependency_ns,
            wait_memory_ns=states.wait_memory_ns,
            wait_host_ns=states.wait_host_ns,
            parked_ns=states.parked_ns,
            launches=launches | graphs.launches,
            steps=dict(self._runner.steps + Counter(graphs.steps)),
            wait_timeouts=self._faults,
            fallbacks=dict(self._fallbacks),
            resident=self._session.resident,
            kernels_avoided=self._runner.n_steps * self._kernels_per_step,
            bytes_streamed=streamed + graphs.bytes_streamed,
        )

    def close(self) -> None:
        """Make the kernel leave; give the device's memory back."""
        if not self._closed:
            self._closed = True
            try:
                self._session.leave()
            except RuntimeFault as fault:
                logger.warning("while closing: %s", fault)
            self._graphs.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeFault("the runtime is closed")

    # ---------------------------------------------------------------- routing

    def _is_resident(self, plan: StepPlan) -> bool:
        n_rows = sum(row.count for row in plan.prefill) + len(plan.decode)
        single = self._chunks or all(row.count == 1 for row in plan.prefill)
        slots = (*plan.decode, *(row.slot for row in plan.prefill))
        return n_rows <= self._max_rows and single and all(self._plain.get(slot, True) for slot in slots)

    def _dispatch(self) -> None:
        """Give plans to who runs them, as far as their turn has come."""
        try:
            while self._queue and self._is_turn(self._queue[0]):
                waiting = self._queue.popleft()
                if waiting.resident:
                    self._runner.submit(waiting.plan)
                else:
                    self._give_to_graphs(waiting.plan, waiting.done)
        except KernelFault as fault:
            self._recover(fault)
            self._dispatch()

    def _is_turn(self, waiting: _Waiting) -> bool:
        """Whether a plan can be given away now; else hurry those that it waits for."""
        if waiting.resident:
            return not self._on_graphs
        if self._runner.busy:
            self._runner.cut()
            return False
        self._session.leave()
        return True

    def _give_to_graphs(self, plan: StepPlan, done: int) -> None:
        self._graphs_plan_id += 1
        lease = min(plan.lease_steps, GRAPHS_LEASE_STEPS)
        self._on_graphs.append((plan.plan_id, done))
        self._graphs.submit(replace(plan, plan_id=self._graphs_plan_id, lease_steps=lease))

    def _collect(self, timeout_s: float) -> None:
        """Take note of results; wait up to `timeout_s` for the first."""
        if not self._on_graphs:
            try:
                self._results += self._runner.poll(timeout_s)
            except KernelFault as fault:
                self._recover(fault)
            return
        for result in self._graphs.poll(timeout_s):
            plan_id, done = self._on_graphs[0]
            self._results.append(replace(result, plan_id=plan_id, step_index=done + result.step_index))
            if result.last:
                self._on_graphs.popleft()

    # ---------------------------------------------------------------- faults

    def _recover(self, fault: KernelFault) -> None:
        """Go on after a fault: on the kernel once, then on graphs."""
        self._faults += 1
        self._results += self._runner.drain()
        if self._faults < FAULTS:
            logger.error("%s; launching it again", fault)
            self._runner.recover()
        else:
            logger.error("%s; the graphs backend takes over", fault)
            self._fallbacks["wait_timeout"] += 1
            for waiting in self._queue:
                waiting.resident = False
            self._queue.extendleft(_Waiting(plan, done, False) for plan, done in reversed(self._runner.give_up()))
