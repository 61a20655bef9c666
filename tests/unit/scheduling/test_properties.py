"""Long random lives of a scheduler, against a runtime that checks every page and every token."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megakernel_runtime.interface import SamplingParams
from server.scheduling.requests import NewRequest
from server.scheduling.settings import SchedulerSettings
from tests.unit.scheduling.life import Life, capacity

small = st.integers


class Lives(RuleBasedStateMachine):
    """Users, engine and device act in any order, each as often as it likes."""

    @initialize(
        slots=small(1, 6), page=small(1, 4), pages=small(6, 40), step=small(2, 20), lease=small(1, 9),
        ahead=small(1, 3), cache=st.booleans(), seed=small(0, 1000),
    )  # fmt: skip
    def begin(self, slots, page, pages, step, lease, ahead, cache, seed):
        sizes = capacity(
            max_slots=slots, page_size_tokens=page, n_pages=pages, max_step_tokens=step, max_lease_steps=lease,
            max_plans_ahead=ahead,
        )  # fmt: skip
        self.life = Life(sizes, SchedulerSettings(max_queue_requests=20, prefix_cache=cache), seed)
        self.count = 0

    @rule(
        length=small(1, 30), shared=small(0, 30), family=small(0, 1), max_tokens=small(1, 20), seed=small(0, 3),
        n=st.sampled_from([1, 1, 1, 2, 4]), priority=small(0, 2), stops=small(0, 6), minimum=small(0, 4),
        salt=st.sampled_from(["", "", "tenant"]), deadline=st.sampled_from([None, None, 1.0, 5.0]),
    )  # fmt: skip
    def submit(self, length, shared, family, max_tokens, seed, n, priority, stops, minimum, salt, deadline):
        self.count += 1
        common = random.Random(family)
        prompt = [common.randrange(50) for _ in range(min(shared, length))]
        prompt += [self.count % 50] * (length - len(prompt))
        sampling = SamplingParams(
            seed=seed, max_tokens=max_tokens, stop_token_ids=tuple(range(stops)), min_tokens=minimum
        )
        due = None if deadline is None else self.life.now + deadline
        new = NewRequest((0, str(self.count)), tuple(prompt), sampling, n, priority, salt, due)
        refusal = self.life.submit(new)
        if refusal is not None and refusal.reason == "too_long":
            assert length + max_tokens > self.life.scheduler.max_model_len_tokens
        elif refusal is not None:
            assert refusal.reason == "queue_full"
            assert self.life.state.queue.n_waiting >= 20

    @rule(which=small(0, 200), choice=st.sampled_from([None, None, 0, 1, 3, 7]))
    def cancel(self, which, choice):
        self.life.cancel((0, str(which % (self.count + 1))), choice)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def pass_time(self, seconds):
        self.life.pass_time(seconds)

    @rule()
    def plan(self):
        self.life.plan()

    @rule(steps=small(1, 12))
    def advance(self, steps):
        for _ in range(steps):
            self.life.runtime.advance()

    @rule(count=small(1, 12))
    def absorb(self, count):
        self.life.absorb(count)

    @rule(turns=small(1, 10))
    def turns(self, turns):
        for _ in range(turns):
            self.life.turn()

    @invariant()
    def books_balance(self):
        if hasattr(self, "life"):
            self.life.check()

    def teardown(self):
        if hasattr(self, "life"):
            self.life.run()


Lives.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestLives = Lives.TestCase


@pytest.mark.parametrize("seed", range(6))
def test_a_long_busy_life(seed):
    """Thousands of requests over few pages: preemption, sharing, cancellation, leases, all at once."""
    rng = random.Random(seed)
    sizes = capacity(
        max_slots=rng.randint(2, 8), n_pages=rng.randint(16, 60), max_lease_steps=rng.choice([1, 4, 16]),
        max_plans_ahead=rng.choice([1, 2, 3]), max_step_tokens=rng.randint(8, 40),
    )  # fmt: skip
    life = Life(sizes, SchedulerSettings(max_queue_requests=30, prefix_cache=bool(seed % 2)), seed)
    for number in range(400):
        length = rng.randint(1, 40)
        sampling = SamplingParams(seed=rng.randrange(99), max_tokens=rng.randint(1, 20), stop_token_ids=(3, 4))
        common = random.Random(rng.randrange(3))
        prompt = tuple(common.randrange(50) for _ in range(length))
        life.submit(NewRequest((0, str(number)), prompt, sampling, rng.choice([1, 1, 3]), rng.randrange(2)))
        if rng.random() < 0.1:
            life.cancel((0, str(rng.randrange(number + 1))), rng.choice([None, 0]))
        for _ in range(rng.randrange(8)):
            life.turn()
            for _ in range(rng.randrange(3)):
                life.runtime.advance()
        life.check()
    life.run()
    assert len(life.told) > 50
    assert life.scheduler.stats.prefix_hits > 0 or not seed % 2
