"""Everything the scheduler knows at one moment: requests, queue, slots, pages, plans under way; and its invariants.

Knows how a sequence enters and leaves a slot. Must not know: who should (planner.py decides).
"""

from __future__ import annotations

from bisect import insort

from megakernel_runtime.interface import Capacity
from server.scheduling.flights import Flights
from server.scheduling.pages import PagePool
from server.scheduling.queue import Deadlines, WaitingQueue
from server.scheduling.requests import Request, RequestKey, Sequence, State
from server.scheduling.settings import SchedulerSettings
from server.scheduling.stats import Stats


class SchedulerState:
    """Shared by planner and scheduler. A slot is free, running, finished (the runtime skips it) or stopping (the host
    ended its sequence, the runtime may not know). The last two are released by the next plan, whatever it is for.
    Their pages are free at once: they can be given away by a plan only, and that plan releases the slots first.
    """

    def __init__(self, capacity: Capacity, settings: SchedulerSettings) -> None:
        self.page_size = capacity.page_size_tokens
        budget = settings.step_token_budget or capacity.max_step_tokens
        self.step_budget = min(budget, capacity.max_step_tokens)
        self.n_slots = min(capacity.max_slots, self.step_budget)  # every running sequence may decode in each step
        self.pool = PagePool(capacity.n_pages, keep=settings.prefix_cache)
        self.queue = WaitingQueue(settings)
        self.deadlines = Deadlines()
        self.flights = Flights(capacity.max_plans_ahead)
        self.requests: dict[RequestKey, Request] = {}
        self.running: list[Sequence] = []  # by rank
        self.free_slots = list(range(self.n_slots - 1, -1, -1))
        self.finished_slots: list[int] = []
        self.stopping_slots: list[int] = []
        self.stats = Stats()
        self.stale = False  # something happened that a new plan could make use of

    @property
    def n_open_slots(self) -> int:
        """Slots that the next plan can admit to."""
        return len(self.free_slots) + len(self.finished_slots) + len(self.stopping_slots)

    def enter(self, sequence: Sequence, slot: int, pages: list[int], cached_len: int) -> None:
        """Give a sequence, taken from the queue, a slot and the pages of all its tokens."""
        sequence.state, sequence.slot, sequence.pages = State.RUNNING, slot, pages
        sequence.target, sequence.n_planned = sequence.n_tokens, cached_len
        sequence.n_published = cached_len // self.page_size
        insort(self.running, sequence, key=_rank)

    def leave(self, sequence: Sequence) -> int:
        """Take a running sequence's pages and slot away; return the slot, which the next plan must release."""
        assert sequence.slot is not None, "a sequence without a slot leaves it"
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        slot, sequence.slot, sequence.pages = sequence.slot, None, []
        if sequence.request.leader is sequence:
            sequence.request.leader = None
        return slot

    def end(self, sequence: Sequence, *, by_runtime: bool) -> None:
        """A sequence is over: finished by the runtime, or ended by the host."""
        if sequence.state is State.RUNNING:
            slot = self.leave(sequence)
            (self.finished_slots if by_runtime else self.stopping_slots).append(slot)
        else:
            self.queue.take(sequence, None)
        sequence.state = State.DONE
        self.stale = True
        request = sequence.request
        request.n_unfinished -= 1
        if request.n_unfinished == 0:
            del self.requests[request.new.key]

    def publish(self, sequence: Sequence, n_written: int) -> None:
        """Let others share the full pages among a running sequence's first `n_written` tokens."""
        sequence.extend_keys(self.page_size)
        for block in range(sequence.n_published, n_written // self.page_size):
            self.pool.publish(sequence.pages[block], sequence.keys[block])
            sequence.n_published = block + 1

    def check_integrity(self) -> None:
        """AssertionError unless every page, slot and sequence is accounted for, once."""
        held = [page for sequence in self.running for page in sequence.pages]
        self.pool.check_integrity(held)
        self.queue.check_integrity()
        slots = [*self.free_slots, *self.finished_slots, *self.stopping_slots]
        slots += [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert sorted(slots) == list(range(self.n_slots)), f"slots are not all accounted for: {sorted(slots)}"
        self._check_sequences()

    def _check_sequences(self) -> None:
        ranks = [sequence.rank for sequence in self.running]
        assert ranks == sorted(set(ranks)), "running sequences are not in order"
        alive = [s for request in self.requests.values() for s in request.sequences if s.state is not State.DONE]
        running = {id(sequence) for sequence in self.running}
        waiting = {id(sequence) for request in self.queue for sequence in request.waiting}
        assert {id(sequence) for sequence in alive} == running | waiting, "a living sequence neither runs nor waits"
        assert not running & waiting, "a sequence runs and waits"
        for key, request in self.requests.items():
            unfinished = [s for s in request.sequences if s.state is not State.DONE]
            assert len(unfinished) == request.n_unfinished > 0, f"request {key} counts its sequences wrongly"
            assert request.leader is None or id(request.leader) in running, f"request {key} has a leader without slot"
        for sequence in self.running:
            n_written = max(sequence.n_planned, sequence.n_tokens + sequence.out_max - 1)
            needed = min(n_written, sequence.max_len - 1)
            assert len(sequence.pages) * self.page_size >= needed, "a sequence may write beyond its pages"
            assert 0 <= sequence.out_min <= sequence.out_max, "what plans may still give is miscounted"


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
