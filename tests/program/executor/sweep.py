"""Random schedules of one model on one grid: `python -m tests.program.executor.sweep llama-3 ...`."""

from __future__ import annotations

import numpy as np

from tests.program.executor.run import run_schedule
from tests.program.executor.scenes import Scene, sequences_of, world_of
from tests.program.executor.world import World
from tests.program.untraced import main

TOLERANCE = 0.05  # of the largest logit: activations are rounded to bf16 between instructions, the reference's are not
SCHEDULES = {
    "llama-1": 40,
    "llama-2": 120,
    "llama-3": 130,
    "llama-6": 20,
    "qwen2-2": 120,
    "qwen2-3": 110,
    "qwen3-2": 110,
    "qwen3-4": 100,
    "mistral-2": 140,
    "mistral-3": 120,
}
HAPPENS = {
    "more rows than before",
    "fewer rows than before",
    "a row had several spans",
    "a row saw another of its step",
    "a slot had ended",
    "a slot had no room",
    "a plan was taken early",
    "a plan cut a lease short",
    "a lease went on",
}


def check(world: World, name: str, same: dict) -> None:
    """Every token is the reference's, logits are near its, and the same in all schedules to the last bit."""
    sequences = sequences_of(name)
    for sample in world.sampled:
        right = sequences[sample.sequence]
        logits = right.logits[sample.position]
        assert sample.token == right.tokens[sample.position]
        assert np.abs(sample.logits - logits).max() < TOLERANCE * np.abs(logits).max()
        known = same.setdefault((sample.sequence, sample.position), sample.logits)
        assert np.array_equal(sample.logits, known)
    assert sorted(token for _, token in world.reported) == sorted(sample.token for sample in world.sampled)


def sweep(of: str) -> None:
    """All schedules of a model on a grid, "llama-3". The seeds' scenes and schedules are always the same."""
    name, grid = of.split("-")
    world = world_of(name, int(grid))
    seen: set[str] = set()
    same = {}
    for seed in range(SCHEDULES[of]):
        run_schedule(world, Scene(name, seed, n_plans=2 + seed % 4).plans, seed)
        check(world, name, same)
        seen |= world.seen
    assert len(same) > 10, "hardly anything was sampled"
    assert seen >= HAPPENS or SCHEDULES[of] < 100, f"what did not happen: {HAPPENS - seen}"


if __name__ == "__main__":
    main(sweep)
