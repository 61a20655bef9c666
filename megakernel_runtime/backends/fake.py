"""A runtime without a model: scripted tokens, delays and failures, with the slots, plans and leases of a real one.

Knows the contract of interface.py and holds its callers to it: a plan that breaks it is a RuntimeFault.
Must not know: torch, requests, text.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megakernel_runtime.backends.fake_script import FakeScript, choose, read_script
from megakernel_runtime.interface import (
    Capacity,
    CapacityError,
    DeviceInfo,
    FinishReason,
    ModelError,
    Progress,
    RuntimeFault,
    RuntimeSpec,
    SampledToken,
    SamplingParams,
    SlotAdmit,
    StepPlan,
    StepResult,
    Telemetry,
)

LOAD_TICK_S = 0.05


def load_fake(spec: RuntimeSpec, progress: Progress) -> FakeRuntime:
    """Return a fake runtime with the spec's sizes and script. Raises ModelError and CapacityError as scripted."""
    script = read_script(spec.fake_script)
    ticks = round(script.load_seconds / LOAD_TICK_S)
    for done in range(ticks):
        progress("weights", done, ticks)
        time.sleep(LOAD_TICK_S)
    if script.model_error:
        raise ModelError(script.model_error)
    if script.capacity_error:
        raise CapacityError(script.capacity_error)
    progress("weights", 1, 1)
    return FakeRuntime(spec, script)


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    n_pages: int
    n_computed: int  # tokens whose KV is there
    finished: bool = False


@dataclass(slots=True)
class _Running:
    plan: StepPlan
    steps: int = 0
    ready_at: float = 0.0  # when its step under way ends


@dataclass(slots=True)
class _Counts:
    steps: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    n_steps: int = 0
    compute_ns: int = 0


class FakeRuntime:
    """Plays a script. One step is done in each `poll`, after the scripted delay."""

    def __init__(self, spec: RuntimeSpec, script: FakeScript) -> None:
        self._script = script
        page = spec.page_size_tokens or 16
        max_slots = spec.max_slots or 64
        max_len = spec.max_model_len_tokens or 32768
        self.capacity = Capacity(
            max_slots=max_slots,
            n_pages=spec.n_pages or max_slots * -(-max_len // page),
            page_size_tokens=page,
            max_model_len_tokens=max_len,
            max_step_tokens=spec.max_step_tokens or max(512, max_slots),
            max_lease_steps=script.max_lease_steps,
            max_plans_ahead=script.max_plans_ahead,
            vocab_size=script.vocab_size,
        )
        self.info = DeviceInfo("fake", "no device", f"script {script.emit}", 0, 0)
        self._slots: dict[int, _Slot] = {}
        self._queue: deque[StepPlan] = deque()
        self._running: _Running | None = None
        self._counts = _Counts()
        self._loaded_ns = time.monotonic_ns()
        self._stalled = False

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises RuntimeFault when more than the capacity allows are unfinished."""
        unfinished = len(self._queue) + (self._running is not None)
        if unfinished >= self.capacity.max_plans_ahead:
            raise RuntimeFault(f"{unfinished} plans are unfinished, no more may be submitted")
        self._queue.append(plan)

    def poll(self, timeout_s: float) -> Sequence[StepResult]:
        """Do one step if it is due within `timeout_s`. Raises RuntimeFault as scripted, or for a plan that is wrong."""
        closed = self._close_superseded()
        running = self._current()
        if running is None:
            return closed
        now = time.monotonic()
        if self._stalled or running.ready_at > now + timeout_s:
            if not closed:
                time.sleep(timeout_s)
            return closed
        if running.ready_at > now:
            time.sleep(running.ready_at - now)
        return (*closed, self._step(running))

    def telemetry(self) -> Telemetry:
        """Return counters: a step's scripted time is computing, all other time is waiting for the host."""
        wall_ns = time.monotonic_ns() - self._loaded_ns
        compute_ns = min(self._counts.compute_ns, wall_ns)
        return Telemetry(compute_ns=compute_ns, wait_host_ns=wall_ns - compute_ns, steps=dict(self._counts.steps))

    def close(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._queue.clear()
        self._running = None

    # ---------------------------------------------------------------- plans

    def _close_superseded(self) -> tuple[StepResult, ...]:
        """Return the last result of the running plan if a later one ends its lease between steps."""
        running = self._running
        if running is None or running.steps == 0 or not self._queue:
            return ()
        self._running = None
        now_ns = time.monotonic_ns()
        return (StepResult(running.plan.plan_id, running.steps, True, (), 0, now_ns, now_ns),)

    def _current(self) -> _Running | None:
        """Return the plan to run now, begun if it is its turn."""
        if self._queue and self._running is None:
            self._running = _Running(self._queue.popleft())
            self._apply(self._running.plan)
            self._start_step(self._running)
        return self._running

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            if self._slots.pop(slot, None) is None:
                raise RuntimeFault(f"plan {plan.plan_id} releases slot {slot}, which is free")
        for admit in plan.admits:
            self._admit(admit)
        for grant in plan.grants:
            self._slot(grant.slot).n_pages += len(grant.pages)

    def _admit(self, admit: SlotAdmit) -> None:
        if admit.slot in self._slots or not 0 <= admit.slot < self.capacity.max_slots:
            raise RuntimeFault(f"slot {admit.slot} is not free")
        self._slots[admit.slot] = _Slot(
            list(admit.tokens), admit.prompt_len, admit.sampling, len(admit.pages), admit.cached_len
        )

    def _slot(self, slot: int) -> _Slot:
        state = self._slots.get(slot)
        if state is None:
            raise RuntimeFault(f"slot {slot} is free but named in a plan")
        return state

    # ---------------------------------------------------------------- steps

    def _start_step(self, running: _Running) -> None:
        """Begin a step: the scripted failures and the delay."""
        self._counts.n_steps += 1
        number, script = self._counts.n_steps, self._script
        if number == script.exit_at_step:
            os._exit(1)
        if number == script.fault_at_step:
            raise RuntimeFault(f"scripted fault in step {number}")
        if number == script.hang_at_step:
            time.sleep(threading.TIMEOUT_MAX)
        self._stalled = self._stalled or number == script.stall_at_step
        delay_s = script.step_seconds
        if script.row_seconds:
            prefill = running.plan.prefill if running.steps == 0 else ()
            delay_s += script.row_seconds * (sum(row.count for row in prefill) + len(running.plan.decode))
        running.ready_at = time.monotonic() + delay_s

    def _step(self, running: _Running) -> StepResult:
        plan, started_ns = running.plan, time.monotonic_ns()
        tokens: list[SampledToken] = []
        prefill = plan.prefill if running.steps == 0 else ()
        for row in prefill:
            state = self._slot(row.slot)
            if row.start != state.n_computed or row.count < 1:
                raise RuntimeFault(f"slot {row.slot} is computed to {state.n_computed}, its row starts at {row.start}")
            self._advance(row.slot, state, row.count, tokens)
        decode = [slot for slot in plan.decode if not self._slot(slot).finished]
        for slot in decode:
            self._advance(slot, self._slots[slot], 1, tokens)
        n_rows = sum(row.count for row in prefill) + len(decode)
        running.steps += 1
        going = [slot for slot in decode if not self._slots[slot].finished]
        last = (
            running.steps >= plan.lease_steps or bool(self._queue) or not going or not all(map(self._has_room, going))
        )
        ended_ns = time.monotonic_ns()
        started_ns -= round(self._script.step_seconds * 1e9)
        result = StepResult(plan.plan_id, running.steps - 1, last, tuple(tokens), n_rows, started_ns, ended_ns)
        self._count(n_rows, bool(prefill), bool(decode), ended_ns - started_ns)
        if last:
            self._running = None
        else:
            self._start_step(running)
        return result

    def _has_room(self, slot: int) -> bool:
        state = self._slots[slot]
        return state.n_computed < state.n_pages * self.capacity.page_size_tokens

    def _advance(self, slot: int, state: _Slot, count: int, tokens: list[SampledToken]) -> None:
        """Compute `count` tokens of a slot; sample when that reaches the end of what is known."""
        state.n_computed += count
        if state.n_computed > min(len(state.tokens), state.n_pages * self.capacity.page_size_tokens):
            raise RuntimeFault(f"slot {slot}: position {state.n_computed} lies beyond its tokens or pages")
        if state.n_computed < len(state.tokens):
            return
        sampled = choose(self._script, slot, state.tokens, state.prompt_len, state.sampling)
        state.tokens.append(sampled.token)
        n_output = len(state.tokens) - state.prompt_len
        if sampled.token in state.sampling.stop_token_ids and n_output > state.sampling.min_tokens:
            sampled = replace(sampled, finish=FinishReason.STOP)
        elif n_output >= state.sampling.max_tokens:
            sampled = replace(sampled, finish=FinishReason.LENGTH)
        state.finished = sampled.finish is not None
        tokens.append(sampled)

    def _count(self, n_rows: int, has_prefill: bool, has_decode: bool, compute_ns: int) -> None:
        kind = "mixed" if has_prefill and has_decode else "prefill" if has_prefill else "decode"
        bucket = 8
        while bucket < n_rows:
            bucket *= 2
        self._counts.steps[bucket, kind] = self._counts.steps.get((bucket, kind), 0) + 1
        self._counts.compute_ns += compute_ns
