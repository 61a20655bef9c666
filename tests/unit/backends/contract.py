"""What interface.py promises of every runtime, as tests: a backend's test module makes `Contract` run on its runtimes.

A subclass gives `make`. Tests assume nothing of the tokens but that the same slot contents give the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from megakernel_runtime.interface import (
    FinishReason,
    PageGrant,
    PrefillRow,
    Runtime,
    RuntimeFault,
    SamplingParams,
    SlotAdmit,
    StepPlan,
    StepResult,
)

PAGE = 4
MAX_SLOTS = 4
MAX_LEN = 64
N_PAGES = MAX_SLOTS * MAX_LEN // PAGE
MAX_STEP_TOKENS = 32
DEADLINE_S = 30.0
PROMPT = (5, 6, 7, 8, 9, 10)


def greedy(max_tokens: int = 40, **kw: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | kw))  # type: ignore[arg-type]


def pages_of(slot: int, n: int = MAX_LEN // PAGE) -> tuple[int, ...]:
    """Pages that no other slot is given here, in falling order, so that none lies where its index says."""
    return tuple(slot + MAX_SLOTS * i for i in reversed(range(n)))


class Driver:
    """A runtime with its plan counter."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.plan_id = 0

    def submit(self, **plan: object) -> int:
        self.plan_id += 1
        self.runtime.submit(StepPlan(self.plan_id, **plan))  # type: ignore[arg-type]
        return self.plan_id

    def poll(self) -> list[StepResult]:
        """Results of at least one step, waited for."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if results := list(self.runtime.poll(0.1)):
                return results
        pytest.fail("no result")

    def finish(self, plan_id: int | None = None) -> list[StepResult]:
        """All results up to the last one of a plan."""
        plan_id = self.plan_id if plan_id is None else plan_id
        results: list[StepResult] = []
        while not any(r.plan_id == plan_id and r.last for r in results):
            results += self.poll()
        return results

    def run(self, **plan: object) -> list[StepResult]:
        self.submit(**plan)
        return self.finish()

    def start(self, slot: int, prompt: Sequence[int] = PROMPT, sampling: SamplingParams | None = None, **kw: object):
        """Admit and prefill a slot; return the first sampled token."""
        pages = kw.pop("pages", pages_of(slot))
        sampling = sampling or greedy()
        admit = SlotAdmit(slot, tuple(prompt), kw.pop("prompt_len", len(prompt)), sampling, pages=pages, **kw)  # type: ignore[arg-type]
        (result,) = self.run(
            admits=(admit,), prefill=(PrefillRow(slot, admit.cached_len, len(prompt) - admit.cached_len),)
        )
        (token,) = result.tokens
        return token

    def decode(self, slot: int, n: int) -> list[int]:
        """Decode a slot n times with n plans."""
        return [self.run(decode=(slot,))[-1].tokens[0].token for _ in range(n)]


def tokens_of(results: Sequence[StepResult], slot: int) -> list[int]:
    return [t.token for r in results for t in r.tokens if t.slot == slot]


class Contract:
    """Inherit, and give a fixture `driver`: a fresh `Driver` of a runtime of the sizes above, with leases of >= 4 steps
    and >= 2 plans ahead."""

    def test_sizes(self, driver):
        c = driver.runtime.capacity
        assert (c.max_slots, c.n_pages, c.page_size_tokens) == (MAX_SLOTS, N_PAGES, PAGE)
        assert (c.max_model_len_tokens, c.max_step_tokens) == (MAX_LEN, MAX_STEP_TOKENS)
        assert c.max_lease_steps >= 4
        assert c.max_plans_ahead >= 2
        assert c.vocab_size > max(PROMPT)
        assert driver.runtime.info.backend

    def test_is_a_runtime(self, driver):
        assert isinstance(driver.runtime, Runtime)

    def test_no_plan_no_result(self, driver):
        assert list(driver.runtime.poll(0.0)) == []

    def test_prefill_in_one_chunk_samples_one_token(self, driver):
        (result,) = driver.run(
            admits=(SlotAdmit(2, PROMPT, len(PROMPT), greedy(), pages=pages_of(2)),),
            prefill=(PrefillRow(2, 0, len(PROMPT)),),
        )
        assert (result.plan_id, result.step_index, result.last, result.n_rows) == (1, 0, True, len(PROMPT))
        (token,) = result.tokens
        assert token.slot == 2
        assert 0 <= token.token < driver.runtime.capacity.vocab_size
        assert (token.logprob, token.top, token.finish) == (None, (), None)
        assert result.started_ns <= result.ended_ns <= time.monotonic_ns()

    def test_chunks_sample_only_at_the_end_and_give_the_same_tokens(self, driver):
        whole = [driver.start(0).token, *driver.decode(0, 5)]
        (first,) = driver.run(
            admits=(SlotAdmit(1, PROMPT, len(PROMPT), greedy(), pages=pages_of(1)),), prefill=(PrefillRow(1, 0, 4),)
        )
        assert (first.tokens, first.n_rows) == ((), 4)
        (second,) = driver.run(prefill=(PrefillRow(1, 4, 2),))
        assert [second.tokens[0].token, *driver.decode(1, 5)] == whole

    def test_prefill_and_decode_rows_share_a_step(self, driver):
        other = (11, 3, 12, 4)
        alone = [driver.start(0).token, *driver.decode(0, 2)]
        alone_other = [driver.start(1, other).token, *driver.decode(1, 1)]
        driver.run(releases=(0, 1))
        first = driver.start(0).token
        (mixed,) = driver.run(
            admits=(SlotAdmit(3, other, 4, greedy(), pages=pages_of(3)),), prefill=(PrefillRow(3, 0, 4),), decode=(0,)
        )
        assert mixed.n_rows == 5
        (both,) = driver.run(decode=(3, 0))
        assert both.n_rows == 2
        assert [first, *tokens_of([mixed, both], 0)] == alone
        assert tokens_of([mixed, both], 3) == alone_other

    def test_slots_do_not_disturb_each_other(self, driver):
        prompts = [(1, 2, 3), (4, 5, 6, 7, 8), (9,), (3, 2, 1, 0, 3, 2, 1, 0, 3)]
        alone = []
        for prompt in prompts:
            alone.append([driver.start(0, prompt).token, *driver.decode(0, 6)])
            driver.run(releases=(0,))
        firsts = [driver.start(i, prompt).token for i, prompt in enumerate(prompts)]
        rest = [driver.run(decode=(2, 0, 3, 1))[0] for _ in range(6)]
        assert [[first, *tokens_of(rest, i)] for i, first in enumerate(firsts)] == alone

    def test_a_lease_feeds_tokens_back_without_the_host(self, driver):
        alone = [driver.start(0).token, *driver.decode(0, 4)]
        driver.run(releases=(0,))
        first = driver.start(1)
        results = driver.run(decode=(1,), lease_steps=4)
        assert [r.step_index for r in results] == [0, 1, 2, 3]
        assert [r.last for r in results] == [False, False, False, True]
        assert [first.token, *tokens_of(results, 1)] == alone

    def test_prefill_rows_run_once_in_a_lease(self, driver):
        driver.start(0)
        results = driver.run(
            admits=(SlotAdmit(1, PROMPT, 6, greedy(), pages=pages_of(1)),),
            prefill=(PrefillRow(1, 0, 6),),
            decode=(0,),
            lease_steps=3,
        )
        assert [r.n_rows for r in results] == [7, 1, 1]
        assert len(tokens_of(results, 1)) == 1
        assert len(tokens_of(results, 0)) == 3

    def test_a_plan_of_prefill_alone_is_one_step(self, driver):
        results = driver.run(
            admits=(SlotAdmit(1, PROMPT, 6, greedy(), pages=pages_of(1)),),
            prefill=(PrefillRow(1, 0, 6),),
            lease_steps=4,
        )
        assert [(r.step_index, r.last) for r in results] == [(0, True)]

    def test_a_later_plan_ends_the_lease(self, driver):
        lease = min(driver.runtime.capacity.max_lease_steps, 32)  # a GPU is done with a short one before we look
        alone = [driver.start(0).token, *driver.decode(0, 34)]
        driver.run(releases=(0,))
        first = driver.start(0).token
        old = driver.submit(decode=(0,), lease_steps=lease)
        results = driver.poll()
        new = driver.submit(decode=(0,))
        results += driver.finish(new)
        of_old = [r for r in results if r.plan_id == old]
        assert [r.step_index for r in of_old] == list(range(len(of_old)))
        assert [r.last for r in of_old] == [False] * (len(of_old) - 1) + [True]
        assert sum(r.n_rows for r in of_old) < lease
        assert [r.plan_id for r in results] == sorted(r.plan_id for r in results)
        tokens = [first, *tokens_of(results, 0)]
        assert tokens == alone[: len(tokens)]

    def test_plans_queued_together_each_run_a_step(self, driver):
        alone = [driver.start(0).token, *driver.decode(0, 5)]
        driver.run(releases=(0,))
        first = driver.start(0).token
        old = driver.submit(decode=(0,), lease_steps=4)
        new = driver.submit(decode=(0,))
        results = driver.finish()
        *of_old, last = results
        assert [r.plan_id for r in of_old] == [old] * len(of_old)  # one step, or more if the device was quick
        assert [r.last for r in of_old] == [False] * (len(of_old) - 1) + [True]
        assert (last.plan_id, last.last, last.n_rows) == (new, True, 1)
        assert 2 <= len(tokens_of(results, 0)) <= 5
        assert [first, *tokens_of(results, 0)] == alone[: 1 + len(tokens_of(results, 0))]

    def test_max_tokens_finishes_once(self, driver):
        token = driver.start(0, sampling=greedy(3))
        assert token.finish is None
        results = driver.run(decode=(0,), lease_steps=4)
        finishes = [t.finish for r in results for t in r.tokens]
        assert finishes == [None, FinishReason.LENGTH]
        assert results[-1].last
        (skipped,) = driver.run(decode=(0,), lease_steps=4)
        assert (skipped.tokens, skipped.n_rows, skipped.last) == ((), 0, True)

    def test_max_tokens_of_one_finishes_in_prefill(self, driver):
        assert driver.start(0, sampling=greedy(1)).finish is FinishReason.LENGTH

    def test_stop_tokens_finish(self, driver):
        tokens = [driver.start(0).token, *driver.decode(0, 3)]
        stop = tokens[2]
        driver.run(releases=(0,))
        token = driver.start(0, sampling=greedy(stop_token_ids=(stop, 0 if stop else 1)))
        seen = [(token.token, token.finish)]
        while seen[-1][1] is None:
            seen += [(t.token, t.finish) for r in driver.run(decode=(0,)) for t in r.tokens]
        assert seen[-1] == (stop, FinishReason.STOP)
        assert [t for t, _ in seen] == tokens[: tokens.index(stop) + 1]

    def test_stop_tokens_are_not_chosen_before_min_tokens(self, driver):
        stop = driver.start(0).token
        driver.run(releases=(0,))
        sampling = greedy(6, stop_token_ids=(stop,), min_tokens=3)
        first = driver.start(0, sampling=sampling)
        results = [t for r in driver.run(decode=(0,), lease_steps=4) for t in r.tokens]
        assert stop not in [t.token for t in (first, *results)][:3]
        assert all(t.finish is None for t in (first, *results)[:3])

    def test_other_rows_go_on_after_one_finished(self, driver):
        alone = [driver.start(1, (4, 5, 6)).token, *driver.decode(1, 4)]
        driver.run(releases=(1,))
        driver.start(0, sampling=greedy(2))
        first = driver.start(1, (4, 5, 6)).token
        results = driver.run(decode=(0, 1), lease_steps=4)
        assert [r.n_rows for r in results] == [2, 1, 1, 1]
        assert [first, *tokens_of(results, 1)] == alone

    def test_a_released_slot_is_free_in_the_same_plan(self, driver):
        expected = driver.start(0, (4, 5, 6)).token
        driver.run(releases=(0,))
        driver.start(0)
        (result,) = driver.run(
            releases=(0,),
            admits=(SlotAdmit(0, (4, 5, 6), 3, greedy(), pages=pages_of(0)),),
            prefill=(PrefillRow(0, 0, 3),),
        )
        assert result.tokens[0].token == expected

    def test_grants_extend_a_slot_in_the_same_plan(self, driver):
        alone = [driver.start(0, (4, 5, 6)).token, *driver.decode(0, 3)]
        driver.run(releases=(0,))
        first = driver.start(0, (4, 5, 6), pages=(9,))
        second = driver.run(decode=(0,))
        rest = driver.run(grants=(PageGrant(0, (30,)),), decode=(0,), lease_steps=2)
        assert [first.token, *tokens_of([*second, *rest], 0)] == alone

    def test_a_lease_ends_where_pages_end(self, driver):
        driver.start(0, (4, 5, 6), pages=(9,))  # 3 of 4 places are used
        results = driver.run(decode=(0,), lease_steps=4)
        assert [(r.n_rows, r.last) for r in results] == [(1, True)]

    def test_cached_tokens_in_shared_pages_are_not_computed_again(self, driver):
        prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
        alone = [driver.start(0, prompt).token, *driver.decode(0, 3)]
        shared = pages_of(0)[:2]
        (result,) = driver.run(
            admits=(SlotAdmit(1, prompt, 9, greedy(), cached_len=8, pages=(*shared, *pages_of(1)[2:5])),),
            prefill=(PrefillRow(1, 8, 1),),
        )
        assert result.n_rows == 1
        assert [result.tokens[0].token, *driver.decode(1, 3)] == alone

    def test_recompute_after_preemption_continues_the_sequence(self, driver):
        alone = [driver.start(0).token, *driver.decode(0, 6)]
        driver.run(releases=(0,))
        token = driver.start(1, (*PROMPT, *alone[:3]), greedy(6), prompt_len=len(PROMPT))
        again = [(token.token, token.finish)]
        again += [(t.token, t.finish) for r in driver.run(decode=(1,), lease_steps=4) for t in r.tokens]
        assert again == [(alone[3], None), (alone[4], None), (alone[5], FinishReason.LENGTH)]

    def test_logprobs_are_given_as_asked(self, driver):
        zero = driver.start(0, sampling=greedy(top_logprobs=0))
        three = driver.start(1, sampling=greedy(top_logprobs=3))
        assert zero.logprob is not None
        assert zero.logprob <= 0.0
        assert zero.top == ()
        assert three.top[0] == (three.token, three.logprob)
        assert len(three.top) == 3
        assert [v for _, v in three.top] == sorted((v for _, v in three.top), reverse=True)

    def test_telemetry_adds_up_to_wall_time(self, driver):
        before_ns, a = time.monotonic_ns(), driver.runtime.telemetry()
        driver.start(0)
        driver.run(decode=(0,), lease_steps=3)
        b, after_ns = driver.runtime.telemetry(), time.monotonic_ns()

        def total(t):
            return t.compute_ns + t.wait_dependency_ns + t.wait_memory_ns + t.wait_host_ns + t.parked_ns

        assert 0 < total(b) - total(a) <= after_ns - before_ns
        assert b.compute_ns >= a.compute_ns
        assert b.wait_host_ns >= a.wait_host_ns
        steps = {kind: n for (_, kind), n in b.steps.items()}
        assert steps == {"prefill": 1, "decode": 3}

    @pytest.mark.parametrize(
        "plan",
        [
            {"decode": (1,)},
            {"releases": (1,)},
            {"grants": (PageGrant(1, (1,)),)},
            {"prefill": (PrefillRow(1, 0, 1),)},
            {"admits": (SlotAdmit(0, (1,), 1, greedy(), pages=(1,)),)},
            {"admits": (SlotAdmit(MAX_SLOTS, (1,), 1, greedy(), pages=(1,)),)},
            {"prefill": (PrefillRow(0, 0, 1),)},
        ],
    )
    def test_wrong_plans_are_faults(self, driver, plan):
        driver.start(0)
        with pytest.raises(RuntimeFault):
            driver.run(**plan)

    def test_too_many_plans_are_a_fault(self, driver):
        driver.start(0)
        for _ in range(driver.runtime.capacity.max_plans_ahead):
            driver.submit(decode=(0,))
        with pytest.raises(RuntimeFault):
            driver.submit(decode=(0,))

    def test_close_twice(self, driver):
        driver.runtime.close()
        driver.runtime.close()
