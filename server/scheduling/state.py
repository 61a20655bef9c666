"""Everything the scheduler knows at one moment: requests, queue, slots, pages, plans under way; and its invariants.

Knows how a sequence enters and leaves a slot. Must not know: who should (planner.py decides).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from megakernel_runtime.interface import Capacity
from server.scheduling.flights import Flights
from server.scheduling.pages import PagePool
from server.scheduling.queue import Deadlines, WaitingQueue
from server.scheduling.requests import Request, RequestKey, Sequence, State
from server.scheduling.settings import SchedulerSettings
from server.scheduling.stats import Stats


@dataclass(frozen=True, slots=True)
class Closing:
    """A slot whose sequence was ended by the host: the runtime may write to its pages until a plan releases it."""

    slot: int
    pages: list[int]


class SchedulerState:
    """Shared by planner and scheduler. A slot is free, running, closing (its pages too), or finished (its pages are
    free: the runtime skips it); the last two become free with the next plan.
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
        self.closing: list[Closing] = []
        self.stats = Stats()
        self.stale = False  # something happened that a new plan could make use of

    @property
    def n_open_slots(self) -> int:
        """Slots that the next plan can admit to."""
        return len(self.free_slots) + len(self.finished_slots) + len(self.closing)

    def enter(self, sequence: Sequence, slot: int, pages: list[int], cached_len: int) -> None:
        """Give a sequence, taken from the queue, a slot and the pages of all its tokens."""
        sequence.state, sequence.slot, sequence.pages = State.RUNNING, slot, pages
        sequence.target, sequence.n_planned = sequence.n_tokens, cached_len
        sequence.n_published = cached_len // self.page_size
        insort(self.running, sequence, key=_rank)

    def leave(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Take a running sequence's slot and pages away; return them."""
        assert sequence.slot is not None, "a sequence without a slot leaves it"
        self.running.remove(sequence)
        slot, pages = sequence.slot, sequence.pages
        sequence.slot, sequence.pages = None, []
        if sequence.request.leader is sequence:
            sequence.request.leader = None
        return slot, pages

    def finish(self, sequence: Sequence) -> None:
        """The runtime finished a sequence: it writes no more, so its pages are free at once."""
        if sequence.state is State.RUNNING:
            slot, pages = self.leave(sequence)
            self.pool.release(pages)
            self.finished_slots.append(slot)
        else:
            self.queue.take(sequence, None)
        self._done(sequence)

    def close(self, sequence: Sequence) -> None:
        """The host ends a sequence: the runtime may still write to its pages until the next plan."""
        if sequence.state is State.RUNNING:
            self.closing.append(Closing(*self.leave(sequence)))
        else:
            self.queue.take(sequence, None)
        self._done(sequence)

    def _done(self, sequence: Sequence) -> None:
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
        held += [page for closing in self.closing for page in closing.pages]
        self.pool.check_integrity(held)
        self.queue.check_integrity()
        slots = [*self.free_slots, *self.finished_slots, *(closing.slot for closing in self.closing)]
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
