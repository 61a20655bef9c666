"""The policy, case by case: what the next plan holds, who is refused, who goes first, what is counted."""

from __future__ import annotations

import pytest

from megakernel_runtime.interface import FinishReason, PrefillRow, SampledToken, SamplingParams, StepResult
from server.scheduling.requests import Failure, NewRequest, Refusal
from server.scheduling.scheduler import Scheduler
from server.scheduling.settings import SchedulerSettings
from tests.unit.scheduling.life import Life, capacity
from tests.unit.scheduling.model_runtime import unbatched


def ask(name: str, prompt=(1, 2, 3), max_tokens=4, **more) -> NewRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=more.pop("seed", 0), **more.pop("sampling", {}))
    return NewRequest((0, name), tuple(prompt), sampling, **more)


def life_with(*requests: NewRequest, settings: SchedulerSettings | None = None, **sizes: int) -> Life:
    life = Life(capacity(**sizes), settings)
    for request in requests:
        assert life.submit(request) is None
    return life


class TestPlans:
    def test_first_comes_the_prompt_then_one_row_a_step(self):
        life = life_with(ask("a", (1, 2, 3)))
        life.run()
        first, *others = life.plans
        assert first.prefill == (PrefillRow(0, 0, 3),)
        assert first.admits[0].tokens == (1, 2, 3)
        assert [plan.decode for plan in others] == [(0,)] * 3
        assert life.told[0, "a"].tokens[0] == unbatched((1, 2, 3), ask("a").sampling)[0]

    def test_nothing_to_do_gives_no_plan(self):
        life = life_with()
        assert life.scheduler.plan(0.0) is None
        assert life.scheduler.is_idle

    def test_a_long_prompt_goes_in_chunks_beside_running_streams(self):
        life = life_with(ask("short", (1, 2), max_tokens=10), max_step_tokens=4, n_pages=50)
        life.turn()
        life.submit(ask("long", range(10), max_tokens=1))
        life.turn()
        life.turn()
        assert [plan.decode for plan in life.plans[1:]] == [(0,), (0,)]
        assert [plan.prefill for plan in life.plans[1:]] == [(PrefillRow(1, 0, 3),), (PrefillRow(1, 3, 3),)]

    def test_the_operators_step_budget_binds(self):
        life = life_with(ask("a", range(10)), settings=SchedulerSettings(step_token_budget=3))
        life.run()
        assert max(row.count for plan in life.plans for row in plan.prefill) == 3

    def test_a_finished_slot_is_released_by_the_plan_that_needs_one(self):
        life = life_with(ask("a", max_tokens=1), ask("b", max_tokens=1), max_slots=1)
        life.run()
        assert [(plan.releases, [admit.slot for admit in plan.admits]) for plan in life.plans] == [
            ((), [0]),
            ((0,), [0]),
        ]

    def test_a_sequence_sure_to_end_gets_no_further_row(self):
        life = life_with(ask("a", max_tokens=1), max_plans_ahead=3)
        life.run()
        assert len(life.plans) == 1


class TestLeases:
    def test_a_lease_brings_its_pages_along(self):
        life = life_with(ask("a", (1, 2, 3), max_tokens=20), max_lease_steps=8, max_plans_ahead=2)
        life.plan()
        prefill, lease = life.plans
        assert (prefill.lease_steps, lease.lease_steps) == (1, 8)
        granted = len(prefill.admits[0].pages) + sum(len(grant.pages) for grant in lease.grants)
        assert granted == -(-(3 + 1 + 8 - 1) // 4)  # prompt, its first token, and seven of the eight that follow

    def test_it_is_renewed_when_half_is_left_and_not_before(self):
        life = life_with(ask("a", max_tokens=40), max_lease_steps=8, max_plans_ahead=2)
        for _ in range(2):
            life.turn()
        renewals = []
        for _ in range(20):
            before = len(life.plans)
            life.turn()
            renewals.append(len(life.plans) - before)
        assert sum(renewals) <= 20 // 4 + 1

    def test_one_that_could_not_be_ended_early_is_never_asked_for(self):
        life = life_with(ask("a", max_tokens=30), max_lease_steps=8, max_plans_ahead=1)
        life.run()
        assert {plan.lease_steps for plan in life.plans} == {1}

    def test_it_ends_with_the_last_token_that_may_come(self):
        life = life_with(ask("a", max_tokens=4), max_lease_steps=16, max_plans_ahead=2)
        life.plan()
        assert life.plans[-1].lease_steps == 3

    def test_it_shrinks_to_the_pages_that_are_there(self):
        life = life_with(ask("a", (1, 2, 3), max_tokens=30), ask("b", (4, 5, 6), max_tokens=30), max_lease_steps=16,
                         max_plans_ahead=2, n_pages=9)  # fmt: skip
        life.plan()
        assert 1 < life.plans[-1].lease_steps < 16
        life.run()

    def test_a_newcomer_does_not_wait_for_it(self):
        life = life_with(ask("a", max_tokens=40), max_lease_steps=16, max_plans_ahead=2)
        for _ in range(4):
            life.turn()
        life.submit(ask("b", (9, 9)))
        life.plan()
        assert life.plans[-1].admits[0].tokens == (9, 9)

    def test_a_cancelled_slot_is_stopped_by_a_plan_of_its_own(self):
        life = life_with(ask("a", max_tokens=40), max_lease_steps=16, max_plans_ahead=2)
        for _ in range(4):
            life.turn()
        life.cancel((0, "a"))
        assert life.told[0, "a"].finished == {0: FinishReason.CANCELLED}
        life.plan()
        assert life.plans[-1].releases == (0,)
        assert not life.plans[-1].decode
        life.run()


class TestSharing:
    def test_a_known_prompt_is_computed_from_its_last_token_on(self):
        life = life_with(ask("a", range(8)))
        life.run()
        life.submit(ask("b", range(8)))
        life.run()
        admit = life.plans[-4].admits[0]
        assert admit.cached_len == 4  # of 8: the second page holds the last token, which is sampled from
        assert life.scheduler.stats.prefix_hits == 4
        assert life.scheduler.stats.prefix_queries == 16

    def test_output_is_known_too(self):
        life = life_with(ask("a", range(6), max_tokens=7))
        life.run()
        known = (*range(6), *life.told[0, "a"].tokens[0])
        assert life.submit(ask("b", known)) is None
        life.plan()
        assert life.plans[-1].admits[0].cached_len == 12

    def test_salts_do_not_share(self):
        life = life_with(ask("a", range(8), cache_salt="one"))
        life.run()
        life.submit(ask("b", range(8), cache_salt="two"))
        life.run()
        assert life.scheduler.stats.prefix_hits == 0

    @pytest.mark.parametrize("cache", [True, False])
    def test_siblings_share_the_prompt_that_the_first_computes(self, cache):
        life = life_with(
            ask("a", range(16), n=4, max_tokens=8), max_step_tokens=8, settings=SchedulerSettings(prefix_cache=cache)
        )
        life.run()
        computed = sum(row.count for plan in life.plans for row in plan.prefill)
        assert computed == 16 + 3 * 4  # the last page of the prompt is everyone's own
        assert life.told[0, "a"].tokens[3] == unbatched(tuple(range(16)), ask("a", seed=3, max_tokens=8).sampling)[0]

    def test_siblings_come_in_together_once_the_prompt_is_there(self):
        life = life_with(ask("a", range(12), n=4, max_tokens=9), max_step_tokens=16)
        life.turn()
        life.turn()
        assert [len(plan.admits) for plan in life.plans] == [1, 3]

    def test_others_go_on_while_siblings_wait(self):
        life = life_with(ask("a", range(12), n=3), ask("b", (7,)), max_step_tokens=16)
        life.plan()
        assert [admit.tokens for admit in life.plans[0].admits] == [tuple(range(12)), (7,)]

    def test_if_the_first_is_cancelled_another_computes_the_prompt(self):
        life = life_with(ask("a", range(12), n=2), max_step_tokens=4)
        life.turn()
        life.cancel((0, "a"), 0)
        life.run()
        assert life.told[0, "a"].finished == {0: FinishReason.CANCELLED, 1: FinishReason.LENGTH}

    def test_without_a_cache_nothing_is_known_later(self):
        life = life_with(ask("a", range(8)), settings=SchedulerSettings(prefix_cache=False))
        life.run()
        life.submit(ask("b", range(8)))
        life.run()
        assert life.scheduler.stats.prefix_hits == 0

    def test_without_a_cache_requests_do_not_share_while_they_run_either(self):
        life = life_with(ask("a", range(8)), settings=SchedulerSettings(prefix_cache=False))
        life.turn()
        life.submit(ask("b", range(8)))
        life.run()
        assert life.scheduler.stats.prefix_hits == 0

    def test_cached_tokens_are_told_with_the_first_token(self):
        life = life_with(ask("a", range(9)))
        life.run()
        life.submit(ask("b", range(9)))
        life.plan()
        life.runtime.advance()
        (event,) = life.scheduler.absorb(life.runtime.poll(1)[0], 0.0)
        assert event.cached_prompt_tokens == 8


class TestPreemption:
    def test_the_youngest_gives_way_and_comes_back(self):
        life = life_with(ask("a", range(8), max_tokens=20), ask("b", range(20, 28), max_tokens=20), n_pages=8)
        life.run()
        assert life.scheduler.stats.preemptions > 0
        again = [admit for plan in life.plans for admit in plan.admits if len(admit.tokens) > 8]
        assert {admit.tokens[0] for admit in again} == {20}
        assert all(admit.prompt_len == 8 for admit in again)

    def test_a_lower_priority_gives_way_first(self):
        life = life_with(
            ask("low", range(8), max_tokens=20, priority=1), ask("high", range(20, 28), max_tokens=20), n_pages=8
        )
        life.run()
        again = {admit.tokens[0] for plan in life.plans for admit in plan.admits if len(admit.tokens) > 8}
        assert again == {0}

    def test_its_tokens_in_flight_are_not_lost(self):
        life = life_with(
            *(ask(str(i), range(10 * i, 10 * i + 8), max_tokens=20) for i in range(3)), n_pages=10, max_plans_ahead=3,
            max_lease_steps=4,
        )  # fmt: skip
        life.run()
        assert life.scheduler.stats.preemptions > 0


class TestQueue:
    def test_priority_then_first_come_first_served(self):
        life = life_with(
            ask("a"), ask("b", priority=1), ask("c", priority=-1), ask("d"), ask("e", priority=-1), max_slots=1
        )
        life.run()
        assert [key[1] for key in life.admitted] == ["c", "e", "a", "d", "b"]

    def test_nobody_small_overtakes_somebody_large(self):
        life = life_with(ask("a", range(8), max_tokens=20), n_pages=8)
        life.turn()
        life.submit(ask("large", range(20, 44), max_tokens=4))
        life.submit(ask("small", (1,), max_tokens=1))
        life.run()
        assert [key[1] for key in life.admitted] == ["a", "large", "small"]

    def test_full_by_requests(self):
        life = life_with(ask("a"), ask("b"), ask("c"), max_slots=1, settings=SchedulerSettings(max_queue_requests=2))
        refusal = life.submit(ask("d"))
        assert refusal == Refusal((0, "d"), "queue_full", "3 requests wait, 2 may: try again later", 1.0)
        life.turn()
        assert life.submit(ask("e")).reason == "queue_full"
        life.run()
        assert life.submit(ask("f")) is None

    def test_full_by_tokens_but_one_always_fits(self):
        settings = SchedulerSettings(max_queue_tokens=10)
        life = life_with(ask("a", range(20)), max_slots=1, settings=settings)
        assert life.submit(ask("b")).message == (
            "20 prompt tokens wait, with this request's 3 they would be more than 10: try again later"
        )

    def test_the_time_to_wait_follows_the_pace_of_the_queue(self):
        life = life_with(*(ask(str(i), max_tokens=4) for i in range(6)), max_slots=1,
                         settings=SchedulerSettings(max_queue_requests=5))  # fmt: skip
        for _ in range(16):
            life.turn()
            life.pass_time(2.0)
        while (refusal := life.submit(ask(str(len(life.told))))) is None:
            pass
        assert 5.0 < refusal.retry_after_s <= 60.0

    def test_cancelled_in_the_queue_it_never_runs(self):
        life = life_with(ask("a"), ask("b"), max_slots=1)
        life.turn()
        life.cancel((0, "b"))
        life.run()
        assert [key[1] for key in life.admitted] == ["a"]

    def test_unknown_and_ended_requests_are_cancelled_in_vain(self):
        life = life_with(ask("a", max_tokens=1))
        life.run()
        assert life.scheduler.cancel((0, "a")) == []
        assert life.scheduler.cancel((0, "nobody"), 3) == []


class TestDeadlines:
    def test_over_in_the_queue_it_is_refused(self):
        life = life_with(ask("a"), ask("b", deadline=1.0), max_slots=1)
        life.turn()
        life.pass_time(1.5)
        over = life.told[0, "b"].over
        assert isinstance(over, Refusal)
        assert over.reason == "deadline"
        assert "after 1.5 s" in over.message
        life.run()

    def test_over_while_it_runs_it_fails(self):
        life = life_with(ask("a", max_tokens=30, deadline=1.0, n=2))
        life.turn()
        life.pass_time(0.5)
        assert life.told[0, "a"].over is None
        life.pass_time(0.5)
        assert isinstance(life.told[0, "a"].over, Failure)
        life.run()

    def test_a_request_that_ended_has_none(self):
        life = life_with(ask("a", max_tokens=1, deadline=1.0))
        life.run()
        life.submit(ask("a", deadline=50.0))  # the id may be used again
        life.pass_time(2.0)
        assert life.told[0, "a"].over is None
        life.run()

    def test_those_of_ended_requests_do_not_pile_up(self):
        life = life_with()
        for number in range(500):
            life.submit(ask(str(number), max_tokens=1, deadline=1000.0))
            life.run()
        assert len(life.state.deadlines._heap) < 100


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "reason", "words"),
        [
            (ask("x", range(40), max_tokens=30), "too_long", "40 prompt tokens and up to 30 generated ones are 70"),
            (ask("x", ()), "invalid", "no tokens"),
            (ask("x", (50,)), "invalid", "prompt has token id 50; the vocabulary has ids 0 to 49"),
            (ask("x", (-1,)), "invalid", "token id -1"),
            (ask("x", n=0), "invalid", "n is 0"),
            (ask("x", max_tokens=0), "invalid", "max_tokens is 0"),
            (ask("x", sampling={"top_logprobs": 21}), "invalid", "top_logprobs is 21"),
            (ask("x", sampling={"logit_bias": ((77, 1.0),)}), "invalid", "logit_bias has token id 77"),
            (ask("x", sampling={"allowed_token_ids": (77,)}), "invalid", "allowed_token_ids"),
            (ask("x", sampling={"stop_token_ids": (77,)}), "invalid", "stop_token_ids"),
        ],
    )
    def test_what_can_never_run(self, request_, reason, words):
        refusal = life_with().submit(request_)
        assert refusal.reason == reason
        assert words in refusal.message

    def test_the_context_is_bounded_by_all_pages_too(self):
        life = life_with(n_pages=5)
        assert life.scheduler.max_model_len_tokens == 21  # the last token needs no place
        assert life.submit(ask("a", range(20), max_tokens=1)) is None
        assert life.submit(ask("b", range(20), max_tokens=2)).reason == "too_long"
        life.run()

    def test_an_id_in_use(self):
        life = life_with(ask("a"))
        assert life.submit(ask("a")).reason == "invalid"

    @pytest.mark.parametrize("name", ["max_queue_requests", "max_queue_tokens", "step_token_budget"])
    def test_settings_that_let_nothing_run(self, name):
        with pytest.raises(ValueError, match=f"{name} is -1; it must be at least"):
            SchedulerSettings(**{name: -1})


def test_times_and_counts():
    life = life_with(ask("a", max_tokens=3), ask("b", max_tokens=3), max_slots=1)
    for _ in range(8):
        life.turn()
        life.pass_time(1.0)
    queue, prefill, decode = life.scheduler.stats.take_samples()
    assert queue == [0.0, 3.0]
    assert prefill == [0.0, 0.0]
    assert decode == [2.0, 2.0]
    assert life.scheduler.stats.take_samples() == ([], [], [])
    assert (life.scheduler.stats.prompt_tokens, life.scheduler.stats.generation_tokens) == (6, 6)


def test_gauges():
    life = life_with(ask("a", range(8), max_tokens=9), ask("b"), max_slots=1)
    life.turn()
    gauges = life.scheduler.gauges
    assert (gauges.n_running, gauges.n_waiting, gauges.kv_usage) == (1, 1, 2 / 24)
    assert life.scheduler.keys == [(0, "a"), (0, "b")]


def test_a_result_of_no_plan_is_a_bug():
    scheduler = Scheduler(capacity(), SchedulerSettings())
    result = StepResult(1, 0, True, (SampledToken(0, 1),), 1, 0, 1)
    with pytest.raises(AssertionError, match="not under way"):
        scheduler.absorb(result, 0.0)


def test_integrity_notices_a_lost_slot():
    life = life_with(ask("a"))
    life.turn()
    life.check()
    life.state.free_slots.pop()
    with pytest.raises(AssertionError, match="slots are not all accounted for"):
        life.check()
