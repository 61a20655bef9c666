"""Runs steps of given shapes: as captured graphs where there are any, else call by call.

Must not know: what a step does, plans, slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megakernel_runtime.backends.graphs.shapes import Shape, smallest_that_holds


class Captured(Protocol):
    """A step captured once. `n_kernels` are the kernels that one replay runs."""

    n_kernels: int

    def replay(self) -> None:
        """Run it again, on the current stream."""
        ...


class Executor:
    """Knows which shapes are captured. `fit` a step's needs, then `run` the shape that it gives."""

    def __init__(self, run_step: Callable[[Shape], None], captured: dict[Shape, Captured]) -> None:
        self._run_step = run_step
        self._captured = captured
        self._shapes: Sequence[Shape] = sorted(captured)
        self._fitted: dict[Shape, Shape] = {}  # of decode steps: there are few, and they come again and again

    def fit(self, needed: Shape) -> Shape:
        """Return the shape as which a step runs best: a captured one if one holds it, else its own."""
        shape = self._fitted.get(needed)
        if shape is None:
            shape = smallest_that_holds(self._shapes, needed) or needed
            if not needed.blocks:
                self._fitted[needed] = shape
        return shape

    def run(self, shape: Shape) -> int:
        """Run the current frame as a step of `shape`. Returns how many kernels were replayed, 0 if uncaptured."""
        graph = self._captured.get(shape)
        if graph is None:
            self._run_step(shape)
            return 0
        graph.replay()
        return graph.n_kernels
