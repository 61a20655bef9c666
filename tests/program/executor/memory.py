"""A weak memory, location by location: what each thread may read is decided by what it is ordered after, not by time.

Three kinds of locations. *Words* are read and written by relaxed operations: every write stays, and a reader may get any
that is not older than what it has read or is ordered after; so a store becomes visible to each reader at a time of its
own, and stores to different words in any order. *Cells* stand for plain data of any size (the payload lies with the
caller): to read or write one without being ordered after all writes that were made to it, or to write one without being
ordered after all reads, is a data race and ends the run. *Counters* carry order: a release keeps what its thread
is ordered after, an acquire that reads it takes that over.

A thread is a whole CTA, or the host. `stamp` is a ghost: which step a word's value belongs to, for judging only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Values = NDArray[np.uint64]

EMPTY = 0xFFFFFFFF
CHANCE_OF_NEWEST = 0.6


class ProtocolError(Exception):
    """The protocol under test let something happen that must not."""


class Race(ProtocolError):
    """An access that is not ordered after another one to the same data."""


class Stale(ProtocolError):
    """A reader took a value of another step or layer for its own."""


class Deadlock(ProtocolError):
    """Everybody waits, and everything that was written is visible."""


@dataclass(slots=True)
class Message:
    """One value of a counter, and what its writers were ordered after."""

    value: int
    view: NDArray[np.int32]
    clock: NDArray[np.int32]


class Memory:
    """Locations are numbered: words, then cells, then counters."""

    def __init__(self, initial: Values, cells: int, counters: int, threads: int, depth: int) -> None:
        """`initial`: what words hold at a launch. A word can be written `depth` times in a run."""
        self.n_words, self.n_cells = words, _ = len(initial), cells
        self._values = np.zeros(depth * words, dtype=np.uint64)  # by write, then word
        self._stamps = np.full(depth * words, -1, dtype=np.int32)
        self._values[:words] = initial
        self._newest = np.zeros(words + cells, dtype=np.int32)
        self._view = np.zeros((threads, words + cells + counters), dtype=np.int32)
        self._clock = np.zeros((threads, threads), dtype=np.int32)
        self._read_at = np.zeros((threads, cells), dtype=np.int32)  # clock of each thread's last read of a cell
        self._counters: list[list[Message]] = [[] for _ in range(counters)]
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Make everything as at a launch: words empty, counters 0, all threads ordered after that."""
        self.rng = np.random.default_rng(seed)
        self.chance = random.Random(seed)
        self.changes = 0  # grows with every write that somebody may wait for
        self._newest[:] = 0
        self._view[:] = 0
        self._clock[:] = 0
        self._clock[np.diag_indices(len(self._clock))] = 1
        self._read_at[:] = 0
        for messages in self._counters:
            messages[:] = [Message(0, self._view[0].copy(), np.zeros(len(self._clock), dtype=np.int32))]

    # ---------------------------------------------------------------- words

    def read(self, thread: int, words: Indices, *, newest: bool) -> tuple[Values, NDArray[np.int32]]:
        """Return values and stamps that relaxed loads of `words` may give; the newest ones if asked for."""
        last = self._newest[words]
        if not newest and self.chance.random() < 0.5:
            known = self._view[thread, words]
            if (last != known).any():
                draws = self.rng.random(len(words)) / (1 - CHANCE_OF_NEWEST)
                last = np.where(draws < 1, known + ((last - known) * draws).astype(np.int32), last)
        self._view[thread, words] = last
        at = last * self.n_words + words
        return self._values.take(at), self._stamps.take(at)

    def write(self, thread: int, words: Indices, values: Values | int, stamp: NDArray[np.int64] | int) -> None:
        """Store to `words`, relaxed. Each word must have one writer at a time: unordered stores are a race."""
        last = self._newest[words]
        if (self._view[thread, words] != last).any():
            raise Race(f"thread {thread} writes words that another's write is not ordered before")
        last = last + 1
        at = last * self.n_words + words
        self._values[at] = values
        self._stamps[at] = stamp
        self._newest[words] = last
        self._view[thread, words] = last
        self.changes += 1

    # ---------------------------------------------------------------- cells

    def plain_read(self, thread: int, cells: Indices | int) -> None:
        """Raise Race unless all writes of `cells` are ordered before."""
        if self._unseen(thread, cells):
            raise Race(f"thread {thread} reads cells {cells} while they are written")
        self._read_at[thread, cells] = self._clock[thread, thread]

    def plain_write(self, thread: int, cells: Indices | int) -> None:
        """Raise Race unless all reads and writes of `cells` are ordered before."""
        if self._unseen(thread, cells):
            raise Race(f"thread {thread} writes cells {cells} while they are written")
        for reader, known in enumerate(self._clock[thread].tolist()):
            if reader != thread and _above(self._read_at[reader, cells], known):
                raise Race(f"thread {thread} writes cells {cells} while {reader} reads them")
        at = cells + self.n_words
        self._newest[at] += 1
        self._view[thread, at] = self._newest[at]

    def _unseen(self, thread: int, cells: Indices | int) -> bool:
        at = cells + self.n_words
        missing = self._view[thread, at] != self._newest[at]
        return bool(missing) if isinstance(cells, int) else bool(missing.any())

    # ---------------------------------------------------------------- counters

    def count(self, thread: int, counter: int, *, release: bool = True) -> None:
        """Add one: an atomic read-modify-write. What earlier ones released stays released by it."""
        self._release(thread, counter, self._counters[counter][-1].value + 1, release, self._counters[counter][-1])

    def publish(self, thread: int, counter: int, value: int, *, release: bool = True) -> None:
        """Set a counter that only this thread sets."""
        self._release(thread, counter, value, release, None)

    def _release(self, thread: int, counter: int, value: int, release: bool, before: Message | None) -> None:
        view = self._view[thread].copy() if release else np.zeros_like(self._view[thread])
        clock = self._clock[thread].copy() if release else np.zeros_like(self._clock[thread])
        if before is not None:
            np.maximum(view, before.view, out=view)
            np.maximum(clock, before.clock, out=clock)
        self._counters[counter].append(Message(value, view, clock))
        self._clock[thread, thread] += 1
        self.changes += 1

    def look(self, thread: int, counter: int, *, newest: bool, acquire: bool = True) -> int:
        """Return a value that a load of `counter` may give, and take over what was released with it."""
        at = self.n_words + self.n_cells + counter
        first, last = int(self._view[thread, at]), len(self._counters[counter]) - 1
        if not newest and first < last and self.chance.random() < 0.5:
            last = self.chance.randrange(first, last)
        message = self._counters[counter][last]
        if acquire and last > first:  # else it was taken over before
            np.maximum(self._view[thread], message.view, out=self._view[thread])
            np.maximum(self._clock[thread], message.clock, out=self._clock[thread])
        self._view[thread, at] = last
        return message.value


def _above(clocks: NDArray[np.int32] | np.int32, known: int) -> bool:
    return bool((clocks > known).any()) if isinstance(clocks, np.ndarray) else int(clocks) > known
