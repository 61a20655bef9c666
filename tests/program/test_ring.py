"""The weight ring: a producer, loads that arrive when they like, and eight warps, in random interleavings.

A warp does as kernels/matrix.py: it gives a tile's slot back when the next product is begun, the last of a row tile at its
end. Its loads from the slot may return as late as the tile's product is awaited. Phases of barriers are
bits, as in the kernel.
"""

import random

import pytest

from megakernel_runtime.program.validate.limits import MIN_STAGES

WARPS = 8
STEP = ((3, 2), (1, 0), (2, 1), (2, 5))  # of each instruction: row tiles, chunks each


class Standstill(Exception):
    """Nobody can go on."""


class Overwritten(Exception):
    """A warp's load returned another tile."""


class Barrier:
    """An mbarrier: completes a phase after so many arrivals."""

    def __init__(self, count):
        self.count, self.left, self.phase = count, count, 0

    def arrive(self):
        self.left -= 1
        if self.left == 0:
            self.left, self.phase = self.count, self.phase ^ 1

    def complete(self, parity):
        """Whether the phase of this parity has completed, as try_wait.parity asks."""
        return self.phase != parity


class Ring:
    """Slots, their barriers, and what lies in them."""

    def __init__(self, stages, early, chance):
        self.stages, self.early, self.chance = stages, early, chance
        self.tiles = [None] * stages
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(WARPS) for _ in range(stages)]
        self.on_the_way = []

    def producer(self, n, steps):
        """Stream the run of n tiles again and again."""
        for g in range(n * steps):
            slot = g % self.stages
            while not self.empty[slot].complete(((g // self.stages) & 1) ^ 1):
                yield False
            self.on_the_way.append((slot, g))
            yield True

    def arrive(self):
        """A load that is on its way arrives."""
        slot, g = self.on_the_way.pop(self.chance.randrange(len(self.on_the_way)))
        self.tiles[slot] = g
        self.full[slot].arrive()

    def warp(self, steps):
        """All products of some steps, in order."""
        taken = 0

        def take():
            nonlocal taken
            slot, phase = taken % self.stages, (taken // self.stages) & 1
            yield True
            while not self.full[slot].complete(phase):
                yield False
            taken += 1
            if self.early:
                self.empty[slot].arrive()
            return taken - 1

        for row_tiles, chunks in STEP * steps:
            for _ in range(row_tiles):
                before = None
                for _ in range(chunks):
                    tile = yield from take()
                    yield True
                    self.finish(before)
                    before = tile
                yield True
                self.finish(before)

    def finish(self, tile):
        """The product of a tile is there: its loads have returned."""
        if tile is not None:
            slot = tile % self.stages
            if self.tiles[slot] != tile:
                raise Overwritten(f"{self.tiles[slot]} instead of {tile}")
            if not self.early:
                self.empty[slot].arrive()


def run(stages, seed, steps=3, *, early=False):
    """One interleaving."""
    chance = random.Random(seed)
    ring = Ring(stages, early, chance)
    n = sum(row_tiles * chunks for row_tiles, chunks in STEP)
    threads = [ring.producer(n, steps), *(ring.warp(steps) for _ in range(WARPS))]
    weights = [chance.choice((1.0, 0.05)) for _ in threads]
    failed = set()
    while threads:
        if ring.on_the_way and (chance.random() < 0.1 or len(failed) == len(threads)):
            ring.arrive()
            failed.clear()
            continue
        if len(failed) == len(threads):
            raise Standstill
        i = chance.choices(range(len(threads)), weights)[0]
        went = next(threads[i], None)
        if went is None:
            del threads[i], weights[i]
            failed.clear()
        elif went:
            failed.clear()
        else:
            failed.add(id(threads[i]))


def run_some(stages, *, early=False):
    for seed in range(30):
        run(stages, seed, early=early)


@pytest.mark.parametrize("stages", [MIN_STAGES, MIN_STAGES + 1, 7, 11])
def test_every_warp_gets_every_tile_in_order(stages):
    assert run_some(stages) is None


def test_fewer_slots_than_the_checker_asks_for_stand_still():
    with pytest.raises(Standstill):
        run_some(MIN_STAGES - 1)


def test_a_slot_given_back_before_its_loads_return_is_overwritten():
    with pytest.raises(Overwritten):
        run_some(7, early=True)
