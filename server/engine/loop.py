"""The engine's loop, one thread: receive, plan, run, absorb, deliver.

Knows messages and the scheduler's calls, and turns one into the other. Must not know: processes, how a runtime is
loaded, HTTP, text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from megakernel_runtime.interface import Runtime, RuntimeFault, StepResult
from server.engine.listener import Listener
from server.engine.messages import (
    PROTOCOL_VERSION,
    ApiToEngine,
    Cancel,
    EngineToApi,
    Failed,
    Fault,
    Hello,
    Rejected,
    Submit,
    TokenLogprobs,
    Tokens,
)
from server.engine.observer import Observer
from server.engine.wire import sampling_of
from server.scheduling.requests import Event, Failure, NewRequest, Refusal, TokenEvent
from server.scheduling.scheduler import Scheduler
from server.scheduling.settings import SchedulerSettings

logger = logging.getLogger(__name__)

POLL_S = 0.05  # how long cancellations and new requests may wait for a step that takes longer


class EngineLoop:
    """Runs one runtime for all connections until it has drained."""

    def __init__(
        self, runtime: Runtime, listener: Listener, settings: SchedulerSettings, *, stall_timeout_s: float
    ) -> None:
        self._runtime = runtime
        self._listener = listener
        self._scheduler = Scheduler(runtime.capacity, settings)
        self._observer = Observer(runtime, self._scheduler)
        self._stall_timeout_s = stall_timeout_s
        self._moved_at = time.monotonic()  # when a plan was submitted or a step ended
        self._draining = False
        self._checked = True  # books were balanced since work ran out

    @property
    def hello(self) -> Hello:
        """What is served, for every new connection."""
        capacity, info = self._runtime.capacity, self._runtime.info
        return Hello(
            version=PROTOCOL_VERSION,
            max_model_len_tokens=self._scheduler.max_model_len_tokens,
            vocab_size=capacity.vocab_size,
            max_slots=capacity.max_slots,
            n_pages=capacity.n_pages,
            page_size_tokens=capacity.page_size_tokens,
            backend=info.backend,
            device=info.device,
            model=info.model,
            weight_bytes=info.weight_bytes,
            kv_bytes=info.kv_bytes,
        )

    def drain(self) -> None:
        """Admit nothing more; `run` returns when nothing runs. May be called by a signal handler."""
        self._draining = True

    def run(self) -> None:
        """Serve until drained. Raises RuntimeFault, after all connections were told."""
        try:
            while not (self._draining and self._scheduler.is_idle):
                self._turn()
        except Exception as error:
            self._listener.broadcast(Fault(str(error) or type(error).__name__))
            raise

    def _turn(self) -> None:
        busy = not self._scheduler.is_idle
        received = self._listener.receive(0.0 if busy else max(0.0, self._observer.due_in(busy=False)))
        for connection, message in received:
            self._handle(connection, message)
        self._plan()
        if self._scheduler.n_unfinished_plans:
            self._absorb(self._runtime.poll(POLL_S))
        for event in self._scheduler.expire(time.monotonic()):
            self._deliver(event)
        self._balance(quiet=not busy and not received)
        if self._observer.due_in(busy=busy) <= 0:
            for frame in self._observer.take():
                self._listener.broadcast(frame)
        self._listener.flush()

    # ---------------------------------------------------------------- plan, run, absorb

    def _plan(self) -> None:
        while (plan := self._scheduler.plan(time.monotonic())) is not None:
            if self._scheduler.n_unfinished_plans == 1:
                self._moved_at = time.monotonic()
            self._runtime.submit(plan)
            self._observer.submitted()

    def _absorb(self, results: Sequence[StepResult]) -> None:
        now = time.monotonic()
        for result in results:
            self._observer.step(result)
            for event in self._scheduler.absorb(result, now):
                self._deliver(event)
        if results:
            self._moved_at = now
            self._observer.absorbed(results[-1].ended_ns)
        elif self._scheduler.n_unfinished_plans and now - self._moved_at > self._stall_timeout_s:
            raise RuntimeFault(f"the device has ended no step for {self._stall_timeout_s:g} s")

    def _balance(self, *, quiet: bool) -> None:
        """Once after each spell of work, see that all books balance: in a quiet moment, for it takes milliseconds."""
        if quiet and not self._checked:
            self._scheduler.check_integrity()
        self._checked = quiet

    # ---------------------------------------------------------------- messages

    def _handle(self, connection: int, message: ApiToEngine | None) -> None:
        if message is None:
            for key in self._scheduler.keys:
                if key[0] == connection:
                    self._scheduler.cancel(key)
        elif isinstance(message, Submit):
            self._submit(connection, message)
        elif isinstance(message, Cancel):
            for event in self._scheduler.cancel((connection, message.request_id), message.choice):
                self._deliver(event)
        else:
            logger.info("draining", extra={"requests": len(self._scheduler.keys)})
            self.drain()

    def _submit(self, connection: int, message: Submit) -> None:
        key, now = (connection, message.request_id), time.monotonic()
        if self._draining:
            text = "the server is stopping and takes no new requests: try again later or elsewhere"
            self._deliver(Refusal(key, "draining", text))
            return
        new = NewRequest(
            key=key,
            prompt=message.prompt,
            sampling=sampling_of(message.sampling),
            n=message.n,
            priority=message.priority,
            cache_salt=message.cache_salt,
            deadline=now + message.deadline_s if message.deadline_s > 0 else None,
        )
        if (refusal := self._scheduler.submit(new, now)) is not None:
            self._deliver(refusal)

    def _deliver(self, event: Event) -> None:
        self._listener.send(event.key[0], message_of(event))


def message_of(event: Event) -> EngineToApi:
    """Return an event as its connection is told."""
    request_id = event.key[1]
    if isinstance(event, Failure):
        return Failed(request_id, event.message, event.reason)
    if isinstance(event, Refusal):
        if event.reason == "invalid":
            return Failed(request_id, f"the request cannot be run: {event.message}")
        return Rejected(request_id, event.reason, event.message, event.retry_after_s)
    return _tokens(request_id, event)


def _tokens(request_id: str, event: TokenEvent) -> Tokens:
    token = event.token
    return Tokens(
        request_id=request_id,
        choice=event.choice,
        tokens=() if token is None else (token.token,),
        logprobs=() if token is None or token.logprob is None else (TokenLogprobs(token.logprob, token.top),),
        finish=None if event.finish is None else event.finish.value,
        cached_prompt_tokens=event.cached_prompt_tokens,
        device_ns=event.device_ns,
    )
