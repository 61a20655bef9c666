"""How results of steps come back: tickets of steps that were started, readable once their step is done.

This is the one for steps that are done when their call returns; cuda_readback.py is the one for a GPU.
Must not know: what results mean.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megakernel_runtime.device_state.words import Words, words_of


@dataclass(frozen=True, slots=True)
class Landed:
    """One step's results on the host, in the order of the frame's outputs, and when it ran (time.monotonic_ns)."""

    result: Words  # (outs, RESULT_WORDS)
    top_ids: Words  # (outs, MAX_TOP_LOGPROBS); without `full`, no rows
    top_logprobs: Tensor  # f32, likewise
    started_ns: int
    ended_ns: int


class Ticket(Protocol):
    """A step that was started."""

    def is_done(self) -> bool:
        """Whether its results can be read."""
        ...

    def read(self, *, waited: bool) -> Landed:
        """Return the results, once. `waited`: it was seen not to be done, and has been watched since."""
        ...


class Readback(Protocol):
    """Copies the result tensors of the tables after each step."""

    def start(self) -> None:
        """Note that a step begins."""
        ...

    def finish(self, n_outs: int, *, full: bool) -> Ticket:
        """Note that it has been given to the device, and have its first `n_outs` results copied."""
        ...


class _Done:
    def __init__(self, landed: Landed) -> None:
        self._landed = landed

    def is_done(self) -> bool:
        return True

    def read(self, *, waited: bool) -> Landed:
        del waited  # its times are the host's own
        return self._landed


class HostReadback:
    """Steps are done when they have returned."""

    def __init__(self, result: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> None:
        self._sources = (result, top_ids, top_logprobs)
        self._started_ns = 0

    def start(self) -> None:
        """See Readback."""
        self._started_ns = time.monotonic_ns()

    def finish(self, n_outs: int, *, full: bool) -> Ticket:
        """See Readback."""
        result, *tops = self._sources
        result = result[:n_outs].clone()
        top_ids, top_logprobs = (top[: n_outs if full else 0].clone() for top in tops)
        landed = Landed(words_of(result), words_of(top_ids), top_logprobs, self._started_ns, time.monotonic_ns())
        return _Done(landed)
