"""One request under way: its prompts run in the engine, their tokens come back as text, choice by choice.

What piles up while the reader is busy is handed over at once, merged for each choice. Leaving ends everything in the
engine. Must not know: HTTP, JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from server.api.job import Job
from server.api.service import RETRY_AFTER_S
from server.engine.client import EngineClient
from server.engine.messages import Cancel, Failed, Rejected, Submit, TokenLogprobs, Tokens
from server.errors import ApiError, DeadlineExceeded, EngineFault, InvalidRequest, NotReady, Overloaded
from server.telemetry.metrics import Metrics
from server.text.pipeline import OutputStream, OutputToken

Reply = Tokens | Rejected | Failed


class Disconnected(Exception):
    """The client closed the connection before the end."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new of one choice. Its first has `first` set, its last `finish`."""

    index: int
    text: str
    tokens: tuple[OutputToken, ...]  # whose text was sent with this or before
    token_ids: tuple[int, ...]  # generated, a stop token included
    first: bool
    finish: str | None  # stop | length
    device_ns: int  # when the device had the last of these tokens, on time.monotonic_ns's scale; 0: not known


@dataclass(slots=True)
class _Choice:
    """One choice's state between deltas."""

    index: int
    prompt: int
    output: OutputStream
    started: bool = False
    last_at: float = 0.0


@dataclass(slots=True)
class _Batch:
    """Tokens of one choice that came since the last time."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish: str | None = None
    device_ns: int = 0


class Generation:
    """An async context: entering submits, leaving cancels what still runs and tells the metrics how it went."""

    def __init__(self, job: Job, engine: EngineClient, metrics: Metrics, received_at: float) -> None:
        self.job = job
        self._engine = engine
        self._metrics = metrics
        self._received_at = received_at  # time.monotonic
        self._choices = [_Choice(i, i // job.n, job.output()) for i in range(len(job.submits) * job.n)]
        self._inbox: list[tuple[int, Reply | BaseException]] = []
        self._arrived = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []
        self._cached_tokens = [0] * len(job.submits)
        self._left = len(self._choices)
        self._finishes: list[str] = []
        self._started = False
        self._gone = False
        self._failed = False
        self._refused = False
        self.first_token_s: float | None = None  # from receipt

    async def __aenter__(self) -> Self:
        """Submit every prompt."""
        self._pumps = [asyncio.create_task(self._pump(i, submit)) for i, submit in enumerate(self.job.submits)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what still runs."""
        for pump in self._pumps:
            pump.cancel()
        if self._refused:
            return  # nothing of it ran
        reason = "error" if self._failed else "cancelled"
        self._metrics.request_finished(
            seconds=time.monotonic() - self._received_at,
            prompt_tokens=self.job.prompt_tokens,
            generation_tokens=self.completion_tokens,
            finish_reasons=[*self._finishes, *[reason] * self._left],
        )

    def abandon(self) -> None:
        """The client has gone: free its slots now. Whoever reads gets Disconnected."""
        self._gone = True
        for pump in self._pumps:
            pump.cancel()
        self._arrived.set()

    def wake(self) -> None:
        """Have a waiting `deltas` return, though nothing came."""
        self._arrived.set()

    # ---------------------------------------------------------------- reading

    async def admitted(self) -> None:
        """Return once the first token is there. Raises as `deltas` does."""
        while not self._inbox and not self._gone:
            await self._wait()
        if self._gone:
            raise Disconnected
        for _, reply in self._inbox:
            self._raise_if_refused(reply)

    async def deltas(self) -> list[ChoiceDelta] | None:
        """Return what is new since the last call, waiting for it; None when every choice has ended, empty if woken.

        Raises ApiError when the engine refused or lost the request, Disconnected when the client has gone.
        """
        if not self._left:
            return None
        if not self._inbox and not self._gone:
            await self._wait()
        if self._gone:
            raise Disconnected
        inbox, self._inbox = self._inbox, []
        end = next((i for i, (_, reply) in enumerate(inbox) if not isinstance(reply, Tokens)), len(inbox))
        if end == 0 and inbox:
            self._raise_if_refused(inbox[0][1])
        self._inbox = inbox[end:]  # what came before a failure is told before it
        return list(self._absorb(inbox[:end]))

    async def _wait(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(choice.output.n_tokens for choice in self._choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, over all prompts."""
        return sum(self._cached_tokens)

    # ---------------------------------------------------------------- inside

    async def _pump(self, prompt: int, submit: Submit) -> None:
        """Move replies into the inbox as they come."""
        try:
            async with aclosing(self._engine.submit(submit)) as replies:
                async for reply in replies:
                    self._inbox.append((prompt, reply))
                    self._arrived.set()
        except Exception as error:  # noqa: BLE001 (handed to the reader, who raises it)
            self._inbox.append((prompt, error))
            self._arrived.set()

    def _absorb(self, inbox: list[tuple[int, Reply | BaseException]]) -> Iterator[ChoiceDelta]:
        batches: dict[int, _Batch] = {}
        for prompt, reply in inbox:
            assert isinstance(reply, Tokens)
            index = prompt * self.job.n + reply.choice
            batch = batches.setdefault(index, _Batch())
            batch.tokens += reply.tokens
            batch.logprobs += reply.logprobs
            batch.finish = reply.finish
            batch.device_ns = reply.device_ns
            if reply.choice == 0 and not self._choices[index].started:
                self._cached_tokens[prompt] = max(self._cached_tokens[prompt], reply.cached_prompt_tokens)
        for index, batch in batches.items():
            choice = self._choices[index]
            if not choice.output.finished:
                yield self._delta(choice, batch)

    def _delta(self, choice: _Choice, batch: _Batch) -> ChoiceDelta:
        if batch.finish not in (None, "stop", "length"):
            self._failed = True
            raise EngineFault(f"the engine ended the request: {batch.finish}", code="engine_fault")
        before = choice.output.n_tokens
        out = choice.output.push(batch.tokens, batch.logprobs, batch.finish)
        n_new = choice.output.n_tokens - before
        first = not choice.started
        self._observe(choice, n_new)
        if out.finish is not None:
            self._end(choice, out.finish, engine_ended=batch.finish is not None)
        prefix = self.job.prefixes[choice.prompt] if first else ""
        ids = tuple(batch.tokens[:n_new])
        return ChoiceDelta(choice.index, prefix + out.text, out.tokens, ids, first, out.finish, batch.device_ns)

    def _end(self, choice: _Choice, finish: str, *, engine_ended: bool) -> None:
        self._left -= 1
        self._finishes.append(finish)
        if not engine_ended:  # a stop string: the engine does not know of text
            submit = self.job.submits[choice.prompt]
            self._engine.cancel(Cancel(submit.request_id, choice.index % self.job.n))

    def _observe(self, choice: _Choice, n_new: int) -> None:
        """Tell the metrics of tokens that are about to be sent."""
        now = time.monotonic()
        if choice.started:
            for _ in range(n_new):  # tokens that came together came, on average, so far apart
                self._metrics.inter_token((now - choice.last_at) / n_new)
        elif not self._started:
            self.first_token_s = now - self._received_at
            self._metrics.first_token(self.first_token_s)
        self._started = choice.started = True
        choice.last_at = now

    def _raise_if_refused(self, reply: Reply | BaseException) -> None:
        """Raise what a reply that is not Tokens means for the client."""
        if isinstance(reply, Tokens):
            return
        self._failed = True
        if isinstance(reply, Rejected):
            self._refused = not self._started
            self._metrics.rejected(reply.reason)
            raise _refusal(reply)
        if isinstance(reply, Failed):
            raise _failure(reply)
        raise reply


def _failure(failed: Failed) -> ApiError:
    """Return a failure as clients are told of it."""
    if failed.reason == "deadline":
        return DeadlineExceeded(failed.message, code="deadline_exceeded")
    if failed.reason == "stopping":
        return NotReady(failed.message, code="draining", retry_after_s=RETRY_AFTER_S["draining"])
    return EngineFault(failed.message, code="engine_fault")


def _refusal(rejected: Rejected) -> ApiError:
    """Return a rejection as clients are told of it."""
    if rejected.reason == "too_long":
        return InvalidRequest(rejected.message, code="context_length_exceeded")
    if rejected.reason in ("not_ready", "draining"):
        return NotReady(rejected.message, code=rejected.reason, retry_after_s=rejected.retry_after_s)
    return Overloaded(rejected.message, code=rejected.reason, retry_after_s=rejected.retry_after_s)
