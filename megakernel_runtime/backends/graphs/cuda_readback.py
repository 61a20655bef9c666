"""Results of steps on a GPU: copied into a ring of pinned memory behind each step, timed by events.

Needs a GPU. Must not know: what results mean.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megakernel_runtime.backends.graphs.readback import Landed, Ticket
from megakernel_runtime.device_state.words import words_of

_ANCHOR_EVERY_NS = 10_000_000_000  # the clocks of host and device part by some 10 us in 1 s; events count in f32


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@dataclass(slots=True)
class _Entry:
    """Pinned copies of the result tensors, and the events around a step."""

    copies: tuple[Tensor, ...]
    started: torch.cuda.Event = field(default_factory=_event)
    ended: torch.cuda.Event = field(default_factory=_event)


class _Clock:
    """Brings events onto the host's monotonic scale: an event whose host time is known, and distances from it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = _event()
        self._event.record(stream)
        self._event.synchronize()
        self._ns = time.monotonic_ns()

    def span(self, entry: _Entry, *, waited: bool) -> tuple[int, int]:
        """Return when a step that is over began and ended. One that was waited for ended just now."""
        now_ns = time.monotonic_ns()
        ended_ns = min(self._ns + _elapsed_ns(self._event, entry.ended), now_ns)
        if ended_ns - self._ns > _ANCHOR_EVERY_NS:
            self._ns = now_ns if waited else ended_ns
            self._event, entry.ended = entry.ended, _event()
            return self._ns - _elapsed_ns(entry.started, self._event), self._ns
        return ended_ns - _elapsed_ns(entry.started, entry.ended), ended_ns


class _CudaTicket:
    def __init__(self, readback: CudaReadback, entry: _Entry, n_outs: int, n_tops: int) -> None:
        self._readback = readback
        self._entry = entry
        self._sizes = (n_outs, n_tops, n_tops)

    def is_done(self) -> bool:
        return self._entry.ended.query()

    def read(self, *, waited: bool) -> Landed:
        return self._readback.take(self._entry, self._sizes, waited=waited)


class CudaReadback:
    """At most `depth` steps may be on their way."""

    def __init__(
        self, result: Tensor, top_ids: Tensor, top_logprobs: Tensor, depth: int, stream: torch.cuda.Stream
    ) -> None:
        self._sources = (result, top_ids, top_logprobs)
        self._free = deque(_Entry(tuple(map(_pinned_like, self._sources))) for _ in range(depth))
        self._stream = stream
        self._clock = _Clock(stream)

    def start(self) -> None:
        """See Readback."""
        self._free[0].started.record(self._stream)

    def finish(self, n_outs: int, *, full: bool) -> Ticket:
        """See Readback."""
        entry = self._free.popleft()
        n_sources = len(self._sources) if full else 1
        for source, copy in zip(self._sources[:n_sources], entry.copies[:n_sources], strict=True):
            copy[:n_outs].copy_(source[:n_outs], non_blocking=True)
        entry.ended.record(self._stream)
        return _CudaTicket(self, entry, n_outs, n_outs if full else 0)

    def take(self, entry: _Entry, sizes: tuple[int, int, int], *, waited: bool) -> Landed:
        """Return what a done step has left in its entry, which is free again."""
        started_ns, ended_ns = self._clock.span(entry, waited=waited)
        result, top_ids, top_logprobs = (copy[:n].clone() for copy, n in zip(entry.copies, sizes, strict=True))
        self._free.append(entry)
        return Landed(words_of(result), words_of(top_ids), top_logprobs, started_ns, ended_ns)


def _pinned_like(source: Tensor) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)


def _elapsed_ns(first: torch.cuda.Event, second: torch.cuda.Event) -> int:
    return round(first.elapsed_time(second) * 1e6)
