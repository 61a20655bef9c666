"""What a CTA can do with memory: waits, stores, plain accesses. Waits give way to other threads.

Must not know: instructions, steps.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.program.executor.memory import EMPTY, Indices, Stale, Values
from tests.program.executor.world import World

PATIENCE = 2  # failed looks after which a wait sees everything that was written: stores do become visible
WHOLE = 0.6  # how often a store is not split


class Turn(enum.Enum):
    """Why a thread gives way."""

    GO = 0  # it can go on at any time
    WAITS = 1  # it looked in vain
    STUCK = 2  # it looked in vain at everything that was written


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step, as a CTA makes it of the plan and the slots' fields."""

    slot: int
    position: int
    first: int  # row at which its segment begins
    first_position: int  # and the position of that
    token: int
    samples: bool
    alive: bool


class Thread:
    """One thread of memory. `parity` of the step it is in decides where words of activations lie."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.memory = world.memory

    # ---------------------------------------------------------------- waits

    def await_words(self, words: Indices, step: int) -> Iterator[Turn]:
        """Return activation words (of a step's buffer) once none is EMPTY; loads of those that are, are repeated."""
        parity = step & 1 if self.world.rules.reads_own_parity else 1 - (step & 1)
        found = yield from self._poll(words + parity * self.world.step_words, lambda values: values == EMPTY, step)
        return found

    def await_marked(self, words: Indices, mark: int | None, stamp: int) -> Iterator[Turn]:
        """Return words whose upper half must be `mark`; unchecked for None."""

        def missing(values: Values):
            return (values >> np.uint64(32)) != mark if mark is not None else np.zeros(len(values), dtype=bool)

        return (yield from self._poll(words, missing, stamp))

    def _poll(self, words: Indices, missing, stamp: int):
        values, stamps = self.memory.read(self.number, words, newest=False)
        looks = 1
        left = np.flatnonzero(missing(values))
        while len(left):
            yield Turn.STUCK if looks > PATIENCE else Turn.WAITS
            values[left], stamps[left] = self.memory.read(self.number, words[left], newest=looks >= PATIENCE)
            left = left[missing(values[left])]
            looks += 1
        if (stamps != stamp).any():
            raise Stale(f"CTA {self.number} takes {stamps[stamps != stamp][0]} for {stamp}")
        return values

    def await_counter(self, counter: int, target: int) -> Iterator[Turn]:
        """Wait until `counter` has reached `target`."""
        looks = 0
        acquire = self.world.rules.acquires
        while self.memory.look(self.number, counter, newest=looks >= PATIENCE, acquire=acquire) < target:
            looks += 1
            yield Turn.STUCK if looks > PATIENCE else Turn.WAITS

    # ---------------------------------------------------------------- stores

    def store(self, words: Indices, values, step: int) -> Iterator[Turn]:
        """Write activation words of a step's buffer, and empty the same words of the other parity."""
        rules, n = self.world.rules, len(words)
        parity = step & 1 if rules.writes_own_parity else 1 - (step & 1)
        for part in self._portions(n):
            own = words[part] + parity * self.world.step_words
            if rules.empties and rules.empties_in_time:
                other = words[part] + (1 - parity) * self.world.step_words
                both = np.concatenate((values[part], np.full(len(other), EMPTY, dtype=values.dtype)))
                stamps = np.repeat((step, -1), len(other))
                self.memory.write(self.number, np.concatenate((own, other)), both, stamps)
            else:
                self.memory.write(self.number, own, values[part], step)
            yield Turn.GO

    def _portions(self, n: int) -> tuple[slice, ...]:
        """Mostly everything at once; or what others may see between is drawn."""
        if self.memory.chance.random() < WHOLE:
            return (slice(0, n),)
        half = self.memory.chance.randrange(1, n)
        return slice(0, half), slice(half, n)

    def empty_words(self, words: Indices, step: int) -> None:
        """Empty activation words of the other parity."""
        self.memory.write(self.number, words + (1 - (step & 1)) * self.world.step_words, EMPTY, -1)

    def store_plainly(self, words: Indices, values: Values, stamp: int) -> Iterator[Turn]:
        """Write words as they are."""
        for part in self._portions(len(words)):
            self.memory.write(self.number, words[part], values[part], stamp)
            yield Turn.GO

    # ---------------------------------------------------------------- plain accesses and counters

    def plain_read(self, cells: Indices | int) -> None:
        """Read cells: see Memory."""
        self.memory.plain_read(self.number, cells)

    def plain_write(self, cells: Indices | int) -> None:
        """Write cells: see Memory."""
        self.memory.plain_write(self.number, cells)

    def signal(self, counter: int) -> None:
        """Add one to a counter, releasing."""
        self.memory.count(self.number, counter, release=self.world.rules.releases)

    def publish(self, counter: int, value: int) -> None:
        """Set a counter, releasing."""
        self.memory.publish(self.number, counter, value, release=self.world.rules.releases)
