"""A runtime that checks everything: KV pages hold what they should, plans keep the contract, tokens depend on all context.

Each computed position writes the hash of all tokens up to it into its page; each sampled token reads every position back.
So a page that is shared wrongly, written twice, or given away too early changes or fails a test.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from megakernel_runtime.interface import Capacity, FinishReason, SampledToken, SamplingParams, StepPlan, StepResult

VOCAB = 50
MASK = 2**61 - 1


def mix(state: int, value: int) -> int:
    return (state * 1_000_003 + value + 0x9E3779B9) * 0x9E3779B97F4A7C15 % MASK


def next_token(context_hash: int, sampling: SamplingParams) -> int:
    return mix(context_hash, sampling.seed) % VOCAB


def finish_of(token: int, n_output: int, sampling: SamplingParams) -> FinishReason | None:
    if token in sampling.stop_token_ids and n_output > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if n_output >= sampling.max_tokens else None


def unbatched(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    """What one sequence alone gives."""
    context, output = 0, []
    for token in prompt:
        context = mix(context, token)
    while True:
        output.append(next_token(context, sampling))
        if (finish := finish_of(output[-1], len(output), sampling)) is not None:
            return output, finish
        context = mix(context, output[-1])


@dataclass
class Slot:
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    pages: list[int]
    computed: int
    finished: bool = False


@dataclass
class Running:
    plan: StepPlan
    steps: int = 0


class ModelRuntime:
    """Steps are run by `advance`, as a device does on its own; `poll` gives the results to the host when it pleases."""

    def __init__(self, capacity: Capacity, rng: random.Random) -> None:
        self.capacity = capacity
        self.rng = rng
        self.slots: dict[int, Slot] = {}
        self.kv: dict[tuple[int, int], int] = {}  # (page, offset) -> hash of all tokens up to there
        self.queue: deque[StepPlan] = deque()
        self.running: Running | None = None
        self.results: deque[StepResult] = deque()
        self.last_plan_id = 0
        self.reported_last = 0  # newest plan whose end the host can know of

    # ---------------------------------------------------------------- the host's side

    def submit(self, plan: StepPlan) -> None:
        assert plan.plan_id == self.last_plan_id + 1
        assert plan.plan_id - self.reported_last <= self.capacity.max_plans_ahead, "too many plans ahead"
        assert 1 <= plan.lease_steps <= self.capacity.max_lease_steps
        rows = [row.slot for row in plan.prefill] + list(plan.decode)
        assert len(rows) == len(set(rows)), "a slot has two rows"
        n_rows = sum(row.count for row in plan.prefill) + len(plan.decode)
        assert n_rows <= self.capacity.max_step_tokens
        assert n_rows or plan.releases, "a plan for nothing"
        self.last_plan_id = plan.plan_id
        self.queue.append(plan)

    def poll(self, count: int) -> list[StepResult]:
        results = [self.results.popleft() for _ in range(min(count, len(self.results)))]
        for result in results:
            self.reported_last = max(self.reported_last, result.plan_id if result.last else result.plan_id - 1)
        return results

    # ---------------------------------------------------------------- the device's side

    def advance(self) -> bool:
        """Run one step; return False if there is nothing to run."""
        if self.running is not None and self.queue and self.running.steps:
            if self.rng.random() < 0.5:  # a superseded plan may say that it is over, or leave it to the next one
                self.emit(self.running, (), 0, last=True)
            self.running = None
        if self.running is None:
            if not self.queue:
                return False
            self.running = Running(self.queue.popleft())
            self.apply(self.running.plan)
        self.step(self.running)
        return True

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            del self.slots[slot]
        for admit in plan.admits:
            assert admit.slot not in self.slots, "admitted to a taken slot"
            assert 0 <= admit.slot < self.capacity.max_slots
            assert admit.cached_len % self.capacity.page_size_tokens == 0
            assert admit.cached_len < len(admit.tokens)
            self.slots[admit.slot] = Slot(
                list(admit.tokens), admit.prompt_len, admit.sampling, list(admit.pages), admit.cached_len
            )
        for grant in plan.grants:
            self.slots[grant.slot].pages += grant.pages
        for slot in self.slots.values():
            assert len(slot.pages) == len(set(slot.pages))
            assert all(0 <= page < self.capacity.n_pages for page in slot.pages)

    def step(self, running: Running) -> None:
        plan, tokens, n_rows = running.plan, [], 0
        for row in plan.prefill if running.steps == 0 else ():
            slot = self.slots[row.slot]
            assert not slot.finished
            assert row.start == slot.computed
            assert row.count > 0
            self.compute(row.slot, row.count, tokens)
            n_rows += row.count
        for number in plan.decode:
            slot = self.slots[number]
            if not slot.finished:
                assert slot.computed == len(slot.tokens) - 1
                self.compute(number, 1, tokens)
                n_rows += 1
        over = running.steps + 1 >= plan.lease_steps or bool(self.queue)
        all_finished = all(self.slots[number].finished for number in plan.decode)
        self.emit(running, tuple(tokens), n_rows, last=over or all_finished)

    def emit(self, running: Running, tokens: tuple[SampledToken, ...], n_rows: int, *, last: bool) -> None:
        self.results.append(StepResult(running.plan.plan_id, running.steps, last, tokens, n_rows, 0, 1))
        running.steps += 1
        if last:
            self.running = None

    def compute(self, number: int, count: int, tokens: list[SampledToken]) -> None:
        slot, size = self.slots[number], self.capacity.page_size_tokens
        assert slot.computed + count <= len(slot.tokens)
        assert slot.computed + count <= len(slot.pages) * size, "no page for what is computed"
        context = self.read(slot)
        for position in range(slot.computed, slot.computed + count):
            context = mix(context, slot.tokens[position])
            page = slot.pages[position // size]
            for other_number, other in self.slots.items():
                shared = other_number != number and not other.finished and page in other.pages
                assert not shared, f"page {page} is written by slot {number} and held by slot {other_number}"
            self.kv[page, position % size] = context
        slot.computed += count
        if slot.computed == len(slot.tokens):
            token = next_token(context, slot.sampling)
            slot.tokens.append(token)
            finish = finish_of(token, len(slot.tokens) - slot.prompt_len, slot.sampling)
            slot.finished = finish is not None
            tokens.append(SampledToken(number, token, finish=finish))

    def read(self, slot: Slot) -> int:
        """Check every position computed so far, return the hash of the last."""
        context, size = 0, self.capacity.page_size_tokens
        for position in range(slot.computed):
            context = mix(context, slot.tokens[position])
            assert self.kv.get((slot.pages[position // size], position % size)) == context, "page holds something else"
        return context
