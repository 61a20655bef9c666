"""Shapes of steps: what a step needs, which shapes are captured, and which captured one holds a step.

Pure arithmetic, standard library only. Must not know: devices, rows' contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK_ROWS = 64  # rows of a chunk that attend together
MAX_CAPTURED_ROWS = 512  # larger steps keep the device busy for longer than their launches take: they run uncaptured
SPARE_BLOCKS = 32  # of captured mixed shapes: so many chunks may end in a block that is not full


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Sizes of one step. All fields but `full` are upper bounds: what is beyond the step's own is skipped."""

    rows: int
    spans: int  # the first `spans` rows may attend alone, by spans of their context
    blocks: int  # blocks of chunk rows
    outs: int  # rows that sample
    full: bool  # some row needs penalties, bias, masks or logprobs

    def holds(self, other: Shape) -> bool:
        """Whether a step of shape `other` can run as this."""
        return (
            self.full == other.full
            and self.rows >= other.rows
            and self.spans >= other.spans
            and self.blocks >= other.blocks
            and self.outs >= other.outs
        )

    @property
    def variant(self) -> str:
        """A name for metrics."""
        kind = "mixed" if self.blocks else "decode"
        return f"{kind}-{self.rows}-full" if self.full else f"{kind}-{self.rows}"


def row_buckets(most: int) -> list[int]:
    """Return the powers of two below `most`, and `most`."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def captured_shapes(max_slots: int, max_step_tokens: int) -> list[Shape]:
    """Return the shapes to capture, smallest first: decode steps of all sizes, and mixed steps up to a bound."""
    shapes: list[Shape] = []
    for full in (False, True):
        shapes += [Shape(rows, rows, 0, rows, full) for rows in row_buckets(max_slots)]
        shapes += [_mixed(rows, max_slots, full=full) for rows in _mixed_buckets(max_step_tokens)]
    return sorted(shapes)


def largest_shapes(max_slots: int, max_step_tokens: int) -> list[Shape]:
    """Return the largest shapes that a step can have."""
    some = min(max_slots, max_step_tokens)
    return [Shape(max_step_tokens, some, max_blocks(max_slots, max_step_tokens), some, full) for full in (False, True)]


def smallest_that_holds(shapes: Iterable[Shape], needed: Shape) -> Shape | None:
    """Return the smallest of `shapes` as which a step of shape `needed` can run. Decode steps run as such only."""
    fitting = (shape for shape in shapes if shape.holds(needed) and bool(shape.blocks) == bool(needed.blocks))
    return min(fitting, default=None)


def max_blocks(max_slots: int, max_step_tokens: int) -> int:
    """Return how many blocks a step can have at most."""
    return max_step_tokens // BLOCK_ROWS + max(max_slots, SPARE_BLOCKS) + 1


def _mixed_buckets(max_step_tokens: int) -> list[int]:
    buckets = [rows for rows in (16, 32, 64, 128, 192, 256, 384, MAX_CAPTURED_ROWS) if rows < max_step_tokens]
    return [*buckets, max_step_tokens] if max_step_tokens <= MAX_CAPTURED_ROWS else buckets


def _mixed(rows: int, max_slots: int, *, full: bool) -> Shape:
    some = min(rows, max_slots)
    return Shape(rows, some, -(-rows // BLOCK_ROWS) + SPARE_BLOCKS, some, full)
