"""Random interleavings: which thread goes next is drawn, so that each seed is one legal schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.program.executor.control import Host
from tests.program.executor.cta import Cta
from tests.program.executor.memory import Deadlock
from tests.program.executor.rules import Rules
from tests.program.executor.thread import Turn
from tests.program.executor.world import Plan, World

BURSTS = (0.0, 0.5, 0.95)  # chance that a thread that can go on does
SLOW = 0.05  # how often a slow thread may be chosen while others can go on
NAP = 12  # changes of memory, at most, before a thread that waits looks again, if others can go on


def run_schedule(world: World, plans: Sequence[Plan], seed: int, rules: Rules | None = None) -> None:
    """Run a scene to its end under one schedule; raises ProtocolError where the protocol fails.

    Afterwards `world.sampled` and `world.reported` say what came out.
    """
    world.reset(seed, rules or Rules())
    host = Host(world, plans)
    threads = [host.run(), *(Cta(world, c).run() for c in range(world.shape.grid))]
    chance = random.Random(seed)
    burst = BURSTS[seed % len(BURSTS)]
    slow = [chance.random() < 0.3 for _ in threads]
    seen = [-1] * len(threads)  # `changes` of memory when a waiting thread had seen everything
    looks_at = [0] * len(threads)  # `changes` at which it looks again
    alive = list(range(len(threads)))
    current = 0
    while alive:
        changes = world.memory.changes
        able = [i for i in alive if looks_at[i] <= changes] or [i for i in alive if seen[i] != changes]
        if not able:
            raise Deadlock(f"threads {alive} (0 is the host, the others are CTAs) wait for ever")
        if current not in able or chance.random() >= burst:
            if chance.random() > SLOW:
                able = [i for i in able if not slow[i]] or able
            current = able[int(chance.random() * len(able))]
        turn = next(threads[current], None)
        if turn is None:
            alive.remove(current)
        elif turn is not Turn.GO:
            seen[current] = world.memory.changes if turn is Turn.STUCK else -1
            looks_at[current] = world.memory.changes + chance.randrange(1, NAP)
    host.read_results(newest=True)
