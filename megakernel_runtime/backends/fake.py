"""A runtime without a model: scripted tokens, delays and failures, with the slots, plans and leases of a real one.

Must not know: torch, requests, text, what plans mean (plan_runner.py does).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from megakernel_runtime.backends.fake_script import FakeScript, choose, read_script
from megakernel_runtime.backends.plan_runner import PlanRunner
from megakernel_runtime.interface import (
    Capacity,
    CapacityError,
    DeviceInfo,
    ModelError,
    Progress,
    RuntimeFault,
    RuntimeSpec,
    StepPlan,
    StepResult,
    Telemetry,
)
from megakernel_runtime.program.slots import Choice, Segment, SlotTable

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


class FakeRuntime:
    """Plays a script. The work of a step, which is to wait, is done in `poll`."""

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
        self._slots = SlotTable(max_slots, page, self.capacity.n_pages, max_len)
        self._runner = PlanRunner(self.capacity, self._slots, self._run_rows)
        self._n_steps = 0
        self._stalled = False

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises RuntimeFault if it breaks the contract of plans."""
        self._runner.submit(plan)

    def poll(self, timeout_s: float) -> Sequence[StepResult]:
        """Do one step, however long it takes, and return what it gave; nothing at once when no plan is unfinished.
        Raises RuntimeFault, in the scripted step or for a plan that is wrong.
        """
        if self._stalled:
            time.sleep(timeout_s)
            return ()
        results = self._runner.step()
        return () if self._stalled else results

    def telemetry(self) -> Telemetry:
        """Return counters: a step's time is computing, all other time is waiting for the host."""
        return self._runner.telemetry(bytes_streamed=0)

    def close(self) -> None:
        """Nothing is held that must be given back."""

    def _run_rows(self, segments: Sequence[Segment]) -> list[Choice]:
        """Fail or wait as scripted; return the scripted token of each segment that samples."""
        self._n_steps += 1
        number, script = self._n_steps, self._script
        if number == script.exit_at_step:
            os._exit(1)
        if number == script.fault_at_step:
            raise RuntimeFault(f"scripted fault in step {number}")
        if number == script.hang_at_step:
            threading.Event().wait()
        self._stalled = number == script.stall_at_step
        if delay_s := script.step_seconds + script.row_seconds * sum(segment.count for segment in segments):
            time.sleep(delay_s)
        choices: list[Choice] = []
        for segment in segments:
            slot = segment.slot
            choice = choose(script, slot.tokens, slot.prompt_len, slot.sampling) if segment.samples else None
            self._slots.advance(segment, None if choice is None else choice.token)
            choices += [] if choice is None else [choice]
        return choices
