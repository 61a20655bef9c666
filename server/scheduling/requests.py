"""The life of a request and of its sequences, as the scheduler sees it. Must not know: policy, plans, pages' owners."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field, replace

from megakernel_runtime.interface import FinishReason, SampledToken, SamplingParams
from server.scheduling.pages import BlockKey, next_key, root_key

RequestKey = tuple[int, str]  # connection, and the id that is unique on it


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What is asked for: `n` sequences over one prompt; sequence i samples with seed + i."""

    key: RequestKey
    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0  # smaller runs first
    cache_salt: str = ""
    deadline: float | None = None  # on the caller's clock, in seconds


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token of one sequence, its end, or both. The last event of a sequence has `finish` set, exactly once."""

    key: RequestKey
    choice: int
    token: SampledToken | None  # None: it ended without a further token
    finish: FinishReason | None = None
    cached_prompt_tokens: int = 0  # on the first event of a sequence
    device_ns: int = 0  # when the device had the token, on the scale of time.monotonic_ns


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request was not queued, or left the queue before anything of it ran. Nothing of it will run."""

    key: RequestKey
    reason: str  # queue_full | too_long | deadline | invalid
    message: str
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The request ended before it was complete, and not by its own wish. No further event of it comes."""

    key: RequestKey
    message: str
    reason: str  # deadline


Event = TokenEvent | Refusal | Failure


class State(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # has a slot
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. `output` is what the host knows of it; the runtime may be `out_max` tokens further."""

    request: Request
    choice: int
    sampling: SamplingParams
    rank: tuple[int, int, int]  # smaller goes first: priority, arrival, choice
    prompt_len: int
    max_len: int  # tokens, prompt included; the last one is never computed, so it needs no place in a page
    keys: list[BlockKey]  # of its full blocks, so far
    output: list[int] = field(default_factory=list[int])
    state: State = State.WAITING
    slot: int | None = None  # while running
    pages: list[int] = field(default_factory=list[int])  # while running, in order
    target: int = 0  # tokens to prefill, set on admission
    n_planned: int = 0  # of these, in plans so far (or found in the prefix cache)
    n_published: int = 0  # blocks whose keys the page pool has
    out_max: int = 0  # tokens that unfinished plans may still give
    out_min: int = 0  # tokens that they will give, unless the sequence finishes
    cached_prompt_tokens: int = 0  # at its first admission
    scheduled_at: float = 0.0  # at its first admission
    scheduled: bool = False  # whether that has been
    first_token_at: float | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens known to the host, prompt included."""
        return self.prompt_len + len(self.output)

    @property
    def prefilling(self) -> bool:
        """Whether part of its tokens is in no plan yet."""
        return self.n_planned < self.target

    @property
    def will_finish(self) -> bool:
        """Whether unfinished plans are sure to bring it to its end."""
        return self.prompt_len + len(self.output) + self.out_min >= self.max_len

    def extend_keys(self, page_size: int) -> None:
        """Compute the keys of full blocks that have none yet."""
        prompt, prompt_len = self.request.new.prompt, self.prompt_len
        while (end := (len(self.keys) + 1) * page_size) <= self.n_tokens:
            start = end - page_size
            block = (*prompt[start:end], *self.output[max(0, start - prompt_len) : max(0, end - prompt_len)])
            self.keys.append(next_key(self.keys[-1] if self.keys else self.request.root, block))


@dataclass(slots=True, eq=False)
class Request:
    """A queued or running request."""

    new: NewRequest
    arrival: int  # rises by one with each request
    submitted_at: float
    root: BlockKey
    sequences: list[Sequence] = field(default_factory=list[Sequence])
    waiting: deque[Sequence] = field(default_factory=deque[Sequence])  # by rank
    leader: Sequence | None = None  # prefills the prompt; the others wait for its pages
    n_unfinished: int = 0
    started: bool = False  # a sequence of it has been admitted

    @property
    def rank(self) -> tuple[int, int]:
        """Place in the queue: priority, then arrival."""
        return self.new.priority, self.arrival


def make_request(new: NewRequest, arrival: int, now: float, page_size: int, *, share: bool) -> Request:
    """Return the request with its sequences, waiting. Unless `share`, only its own sequences share its pages."""
    root = root_key(f"shared/{new.cache_salt}" if share else f"own/{arrival}")
    request = Request(new, arrival, now, root, n_unfinished=new.n)
    keys: list[BlockKey] = []
    for choice in range(new.n):
        sampling = replace(new.sampling, seed=(new.sampling.seed + choice) % 2**64)
        rank = (*request.rank, choice)
        prompt_len = len(new.prompt)
        sequence = Sequence(
            request, choice, sampling, rank, prompt_len, prompt_len + sampling.max_tokens, keys=list(keys)
        )
        sequence.extend_keys(page_size)
        keys = sequence.keys
        request.sequences.append(sequence)
    request.waiting.extend(request.sequences)
    return request
