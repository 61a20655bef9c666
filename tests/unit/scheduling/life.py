"""Drives a scheduler and a ModelRuntime through a life, and checks all that must hold of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from megakernel_runtime.interface import Capacity, FinishReason
from server.scheduling.requests import Event, Failure, NewRequest, Refusal, TokenEvent
from server.scheduling.scheduler import Scheduler
from server.scheduling.settings import SchedulerSettings
from tests.unit.scheduling.model_runtime import ModelRuntime, unbatched


@dataclass
class Told:
    """What the user of one request was told."""

    new: NewRequest
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    over: Refusal | Failure | None = None

    @property
    def done(self) -> bool:
        return self.over is not None or len(self.finished) == self.new.n


def capacity(**changes: int) -> Capacity:
    default = Capacity(
        max_slots=4,
        n_pages=24,
        page_size_tokens=4,
        max_model_len_tokens=64,
        max_step_tokens=16,
        max_lease_steps=1,
        max_plans_ahead=1,
        vocab_size=50,
    )
    return replace(default, **changes)


class Life:
    def __init__(self, sizes: Capacity, settings: SchedulerSettings | None = None, seed: int = 0) -> None:
        self.sizes = sizes
        self.scheduler = Scheduler(sizes, settings or SchedulerSettings())
        self.runtime = ModelRuntime(sizes, random.Random(seed))
        self.told: dict[tuple[int, str], Told] = {}
        self.now = 0.0
        self.admitted: list[tuple[int, str]] = []  # requests in the order of their first admission
        self.plans = []

    @property
    def state(self):
        return self.scheduler._state

    # ---------------------------------------------------------------- what a user does

    def submit(self, new: NewRequest) -> Refusal | None:
        refusal = self.scheduler.submit(new, self.now)
        if refusal is None:
            self.told[new.key] = Told(new)
        return refusal

    def cancel(self, key: tuple[int, str], choice: int | None = None) -> None:
        self.tell(self.scheduler.cancel(key, choice))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tell(self.scheduler.expire(self.now))

    # ---------------------------------------------------------------- what engine and device do

    def plan(self) -> None:
        while True:
            fresh = {request.new.key for request in self.state.requests.values() if not request.started}
            plan = self.scheduler.plan(self.now)
            if plan is None:
                return
            self.check_fair(plan, fresh)
            self.plans.append(plan)
            self.runtime.submit(plan)

    def check_fair(self, plan, fresh) -> None:
        """Whoever is admitted for the first time passes nobody who came before and has had nothing yet."""
        by_slot = {sequence.slot: sequence for sequence in self.state.running}
        for admit in plan.admits:
            request = by_slot[admit.slot].request
            if request.new.key in fresh:
                fresh.remove(request.new.key)
                self.admitted.append(request.new.key)
                overtaken = [r.new.key for r in self.state.queue if not r.started and r.rank < request.rank]
                assert not overtaken, f"{request.new.key} overtook {overtaken}"

    def absorb(self, count: int = 1000) -> None:
        for result in self.runtime.poll(count):
            self.tell(self.scheduler.absorb(result, self.now))

    def turn(self) -> None:
        self.plan()
        self.runtime.advance()
        self.absorb()

    def run(self, turns: int = 3_000) -> None:
        """Go on until all is done."""
        while not self.scheduler.is_idle and turns:
            self.turn()
            turns -= 1
        assert self.scheduler.is_idle, "it never ends"
        self.plan()
        self.check_end()

    # ---------------------------------------------------------------- what must hold

    def tell(self, events: list[Event]) -> None:
        for event in events:
            told = self.told[event.key]
            assert told.over is None, "an event after the end"
            if isinstance(event, TokenEvent):
                assert event.choice not in told.finished, "an event after the end of its choice"
                if event.token is not None:
                    told.tokens.setdefault(event.choice, []).append(event.token.token)
                if event.finish is not None:
                    told.finished[event.choice] = event.finish
            else:
                assert not (isinstance(event, Refusal) and told.tokens), "refused after it had begun"
                told.over = event

    def check(self) -> None:
        self.scheduler.check_integrity()

    def check_end(self) -> None:
        """Everybody was told everything, once, and it is what they would have had alone; nothing is left behind."""
        self.check()
        assert all(told.done for told in self.told.values())
        assert self.scheduler.gauges.kv_usage == 0
        for told in self.told.values():
            for choice, tokens in told.tokens.items():
                self.check_tokens(told, choice, tokens)

    def check_tokens(self, told: Told, choice: int, tokens: list[int]) -> None:
        sampling = replace(told.new.sampling, seed=told.new.sampling.seed + choice)
        expected, finish = unbatched(told.new.prompt, sampling)
        assert tokens == expected[: len(tokens)]
        if told.finished.get(choice) in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == expected
            assert told.finished[choice] == finish
