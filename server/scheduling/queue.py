"""The queue of requests with waiting sequences: by priority, then first come, first served; bounded; deadlines.

Must not know: slots, pages, plans.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from server.scheduling.requests import Refusal, Request, RequestKey, Sequence, State
from server.scheduling.settings import SchedulerSettings

PACE_WEIGHT = 0.2  # of the newest interval in the moving average
RETRY_BOUNDS_S = (1.0, 60.0)
KEPT_DEADLINES = 64  # of requests that ended


class WaitingQueue:
    """Requests in the order in which their sequences are to be admitted."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._requests: list[Request] = []  # by rank
        self._new_requests = 0  # of which nothing has run yet
        self._new_tokens = 0  # their prompts
        self._n_waiting = 0
        self._pace_s = 0.0  # between two requests leaving the queue for the first time
        self._last_left: float | None = None

    def __iter__(self) -> Iterator[Request]:
        """Iterate by rank, over a snapshot: requests may be admitted meanwhile."""
        return iter(tuple(self._requests))

    def __bool__(self) -> bool:
        """Whether any sequence waits."""
        return bool(self._requests)

    @property
    def n_waiting(self) -> int:
        """Sequences that wait, preempted ones included."""
        return self._n_waiting

    def refuse(self, prompt_tokens: int, n_free_slots: int) -> tuple[str, float] | None:
        """Return why a new request finds no place, and after how many seconds to try again; None if it does."""
        limit = self._settings.max_queue_requests
        if self._new_requests >= limit + n_free_slots:
            message = f"{self._new_requests} requests wait, {limit} may"
        elif self._new_requests and self._new_tokens + prompt_tokens > self._settings.max_queue_tokens:
            message = (
                f"{self._new_tokens} prompt tokens wait, with this request's {prompt_tokens} they would be more than "
                f"{self._settings.max_queue_tokens}"
            )
        else:
            return None
        least, most = RETRY_BOUNDS_S
        return f"{message}: try again later", min(max(self._pace_s * self._new_requests, least), most)

    def add(self, request: Request) -> None:
        """Put a new request in."""
        insort(self._requests, request, key=_rank)
        self._new_requests += 1
        self._new_tokens += len(request.new.prompt)
        self._n_waiting += len(request.waiting)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence in, at the place of its arrival."""
        request = sequence.request
        if not request.waiting:
            insort(self._requests, request, key=_rank)
        waiting = sorted((*request.waiting, sequence), key=lambda waiter: waiter.rank)
        request.waiting.clear()
        request.waiting.extend(waiting)
        sequence.state = State.WAITING
        self._n_waiting += 1

    def take(self, sequence: Sequence, now: float | None) -> None:
        """Take a sequence out: admitted at `now`, or ended without having run on (None)."""
        request = sequence.request
        if request.waiting[0] is sequence:
            request.waiting.popleft()
        else:
            request.waiting.remove(sequence)
        self._n_waiting -= 1
        if not request.waiting:
            del self._requests[bisect_left(self._requests, request.rank, key=_rank)]
        if not request.started and (now is not None or not request.waiting):
            self._forget_new(request)
        if now is not None and not request.started:
            request.started = True
            self._left(now)

    def _forget_new(self, request: Request) -> None:
        self._new_requests -= 1
        self._new_tokens -= len(request.new.prompt)

    def _left(self, now: float) -> None:
        if self._last_left is not None:
            self._pace_s += PACE_WEIGHT * (now - self._last_left - self._pace_s)
        self._last_left = now

    def check_integrity(self) -> None:
        """AssertionError unless counts, order and states agree."""
        ranks = [request.rank for request in self._requests]
        assert ranks == sorted(set(ranks)), "queue is not in order"
        waiting = [sequence for request in self._requests for sequence in request.waiting]
        assert len(waiting) == self._n_waiting, "count of waiting sequences is wrong"
        assert all(request.waiting for request in self._requests), "a request without waiting sequences is queued"
        assert all(sequence.state is State.WAITING for sequence in waiting), "a queued sequence does not wait"
        new = [request for request in self._requests if not request.started]
        assert len(new) == self._new_requests, "count of new requests is wrong"
        assert sum(len(request.new.prompt) for request in new) == self._new_tokens, "count of new tokens is wrong"


class Deadlines:
    """Which requests end when, soonest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestKey]] = []

    def add(self, request: Request, alive: Mapping[RequestKey, Request]) -> None:
        """Watch a request, if it has a deadline. Requests that ended are forgotten once they are the most."""
        if request.new.deadline is None:
            return
        heapq.heappush(self._heap, (request.new.deadline, request.arrival, request.new.key))
        if len(self._heap) > 2 * len(alive) + KEPT_DEADLINES:
            self._heap = [entry for entry in self._heap if entry[2] in alive]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> Iterator[tuple[RequestKey, int]]:
        """Yield key and arrival of requests whose deadline has passed; they may have ended before."""
        while self._heap and self._heap[0][0] <= now:
            _, arrival, key = heapq.heappop(self._heap)
            yield key, arrival


def queue_full(key: RequestKey, verdict: tuple[str, float]) -> Refusal:
    """Return the refusal that `WaitingQueue.refuse` meant."""
    message, retry_after_s = verdict
    return Refusal(key, "queue_full", message, retry_after_s)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
