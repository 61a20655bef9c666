"""The scheduler: requests in, plans out, results in, events out. Time is passed in, in seconds of any steady clock.

Must not know: runtimes, sockets, processes, text.
"""

from __future__ import annotations

from megakernel_runtime.interface import Capacity, FinishReason, SampledToken, StepPlan, StepResult
from server.scheduling.planner import Planner
from server.scheduling.queue import queue_full
from server.scheduling.requests import (
    Event,
    Failure,
    NewRequest,
    Refusal,
    Request,
    RequestKey,
    Sequence,
    State,
    TokenEvent,
    make_request,
)
from server.scheduling.settings import SchedulerSettings
from server.scheduling.state import SchedulerState
from server.scheduling.stats import Gauges, Stats
from server.scheduling.validate import longest, refuse


class Scheduler:
    """Drives one runtime. Call `plan` until it returns None, submit each plan, and `absorb` every result."""

    def __init__(self, capacity: Capacity, settings: SchedulerSettings) -> None:
        self._capacity = capacity
        self._share = settings.prefix_cache
        self._state = SchedulerState(capacity, settings)
        self._planner = Planner(self._state, capacity)
        self._arrivals = 0

    # ---------------------------------------------------------------- requests

    def submit(self, new: NewRequest, now: float) -> Refusal | None:
        """Queue a request; return why not, if it cannot be."""
        state = self._state
        if refusal := refuse(new, self._capacity):
            return refusal
        if new.key in state.requests:
            return Refusal(new.key, "invalid", f"request id {new.key[1]!r} is in use")
        if verdict := state.queue.refuse(len(new.prompt), state.n_open_slots):
            return queue_full(new.key, verdict)
        self._arrivals += 1
        request = make_request(new, self._arrivals, now, state.page_size, share=self._share)
        state.requests[new.key] = request
        state.queue.add(request)
        state.deadlines.add(request, state.requests)
        state.stale = True
        return None

    def cancel(self, key: RequestKey, choice: int | None = None) -> list[TokenEvent]:
        """End a request, or one choice of it; return the last event of each sequence that ends by this."""
        request = self._state.requests.get(key)
        if request is None:
            return []
        chosen = request.sequences if choice is None else request.sequences[choice : choice + 1]
        ended = [sequence for sequence in chosen if sequence.state is not State.DONE]
        for sequence in ended:
            self._state.end(sequence, by_runtime=False)
        return [TokenEvent(key, sequence.choice, None, FinishReason.CANCELLED) for sequence in ended]

    def expire(self, now: float) -> list[Refusal | Failure]:
        """End requests whose deadline has passed; return one event for each."""
        events: list[Refusal | Failure] = []
        for key, arrival in self._state.deadlines.pop_due(now):
            request = self._state.requests.get(key)
            if request is not None and request.arrival == arrival:
                events.append(_expired(request, now))
                self.cancel(key)
        return events

    # ---------------------------------------------------------------- the loop's two calls

    def plan(self, now: float) -> StepPlan | None:
        """Return the next plan, which the caller must submit; None if no plan is to be submitted now."""
        return self._planner.plan(now)

    def absorb(self, result: StepResult, now: float) -> list[Event]:
        """Take over what a step gave; return an event for each new token of a living sequence."""
        flight, ended = self._state.flights.step(result)
        events: list[Event] = []
        for token in result.tokens:
            sequence = flight.sequences[token.slot]
            if sequence.state is not State.DONE:  # else it was ended by the host meanwhile
                events.append(self._take_token(sequence, token, result.ended_ns, now))
        self._state.stale = self._state.stale or ended
        return events

    def _take_token(self, sequence: Sequence, token: SampledToken, ended_ns: int, now: float) -> TokenEvent:
        state, stats = self._state, self._state.stats
        sequence.output.append(token.token)
        stats.generation_tokens += 1
        first = sequence.first_token_at is None
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            stats.prefill_times.append(now - sequence.scheduled_at)
        n_written = sequence.n_tokens - 1  # the token is here, its keys and values are not
        if sequence.state is State.RUNNING and n_written % state.page_size == 0:
            state.publish(sequence, n_written)
        if token.finish is not None:
            stats.decode_times.append(now - sequence.first_token_at)
            state.end(sequence, by_runtime=True)
        return TokenEvent(
            key=sequence.request.new.key,
            choice=sequence.choice,
            token=token,
            finish=token.finish,
            cached_prompt_tokens=sequence.cached_prompt_tokens if first else 0,
            device_ns=ended_ns,
        )

    # ---------------------------------------------------------------- how things stand

    @property
    def max_model_len_tokens(self) -> int:
        """Tokens that one sequence may have, prompt and output together."""
        return longest(self._capacity)

    @property
    def stats(self) -> Stats:
        """Counters and samples so far."""
        return self._state.stats

    @property
    def gauges(self) -> Gauges:
        """Return how many sequences run and wait, and how full the pages are."""
        state = self._state
        usage = state.pool.n_live / self._capacity.n_pages
        return Gauges(len(state.running), state.queue.n_waiting, usage)

    @property
    def n_unfinished_plans(self) -> int:
        """Plans that were returned and have given no last result."""
        return len(self._state.flights)

    @property
    def keys(self) -> list[RequestKey]:
        """Requests that wait or run."""
        return list(self._state.requests)

    @property
    def is_idle(self) -> bool:
        """Whether no request lives and no plan is under way."""
        return not self._state.requests and not self._state.flights

    def check_integrity(self) -> None:
        """AssertionError unless all pages, slots and sequences are accounted for; when idle, all must be free."""
        self._state.check_integrity()
        if self.is_idle:
            assert self._state.pool.n_live == 0, "pages are held though nothing runs"


def _expired(request: Request, now: float) -> Refusal | Failure:
    """Return what to say of a request whose deadline has passed."""
    spent = f"the request's time was over after {now - request.submitted_at:.1f} s"
    if not request.started:
        return Refusal(request.new.key, "deadline", f"{spent}, spent in the queue: try again later, or allow more time")
    message = f"{spent}, before its answer was complete: ask for fewer tokens or allow more time"
    return Failure(request.new.key, message, "deadline")
