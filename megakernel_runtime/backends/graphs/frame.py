"""What the rows of a step are, as words for the device: from segments to a frame.

Rows that attend alone come first, then chunks, cut into blocks. A row's token and position of -1 stand for what the
slot says on the device: decode steps look the same again and again, and need not be sent.
Must not know: tensors' devices, models, plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakernel_runtime.backends.graphs.shapes import BLOCK_ROWS, Shape
from megakernel_runtime.device_state.words import Words, tensor_of
from megakernel_runtime.program.slots import Segment

ROW_WORDS = 4  # slot (-1: none), token, position, 1 if it attends by spans
BLOCK_WORDS = 4  # first row, rows (0: none), slot, position of the first row
FROM_SLOT = -1


@dataclass(frozen=True, slots=True)
class Frame:
    """The rows of one step in their order. `key` equals another frame's only if the words would too."""

    singles: tuple[Segment, ...]
    chunks: tuple[Segment, ...]
    sampling: tuple[Segment, ...]  # in the order in which they were given
    needs: Shape
    key: object


def make_frame(segments: Sequence[Segment], *, full: bool) -> Frame:
    """Return the frame of `segments`, which are of distinct slots."""
    singles = tuple([s for s in segments if s.count == 1])
    chunks = tuple([s for s in segments if s.count > 1])
    sampling = tuple([s for s in segments if s.samples])
    needs = Shape(
        rows=len(singles) + sum([s.count for s in chunks]),
        spans=len(singles),
        blocks=sum(-(-s.count // BLOCK_ROWS) for s in chunks),
        outs=len(sampling),
        full=full,
    )
    # Of a single row, that it samples and that it is the last token of its slot is the same.
    repeats = not chunks and len(sampling) == len(singles)
    key = tuple([s.slot.index for s in singles]) if repeats else object()
    return Frame(singles, chunks, sampling, needs, key)


class FrameLayout:
    """Where in one tensor of words outputs, blocks and rows lie; rows come last, so that small steps send little."""

    def __init__(self, max_rows: int, max_blocks: int, max_outs: int, device: torch.device) -> None:
        self._at_blocks = max_outs
        self._at_rows = max_outs + max_blocks * BLOCK_WORDS
        self.words = torch.zeros(self._at_rows + max_rows * ROW_WORDS, dtype=torch.int32, device=device)
        self.outs = self.words[: self._at_blocks]  # the row that each output samples from, -1: none
        self.blocks = self.words[self._at_blocks : self._at_rows].view(-1, BLOCK_WORDS)
        self.rows = self.words[self._at_rows :].view(-1, ROW_WORDS)
        self.words.copy_(tensor_of(self._empty(max_rows)))

    def fill(self, frame: Frame, shape: Shape) -> Tensor:
        """Return the first words of the tensor as `frame` wants them when it runs as `shape`, on the host."""
        words = self._empty(shape.rows)
        outs = words[: self._at_blocks]
        blocks = words[self._at_blocks : self._at_rows].reshape(-1, BLOCK_WORDS)
        rows = words[self._at_rows :].reshape(-1, ROW_WORDS)
        row = block = 0
        last_rows: dict[int, int] = {}  # by slot
        for segment in (*frame.singles, *frame.chunks):
            end = row + segment.count
            rows[row:end, 0] = segment.slot.index
            rows[row:end, 3] = segment.count == 1
            if segment.count > 1 or not segment.samples:
                rows[row:end, 1] = segment.slot.tokens[segment.start : segment.end]
                rows[row:end, 2] = np.arange(segment.start, segment.end)
            if segment.count > 1:
                for first in range(0, segment.count, BLOCK_ROWS):
                    size = min(BLOCK_ROWS, segment.count - first)
                    blocks[block] = row + first, size, segment.slot.index, segment.start + first
                    block += 1
            last_rows[segment.slot.index] = end - 1
            row = end
        outs[: len(frame.sampling)] = [last_rows[s.slot.index] for s in frame.sampling]
        return tensor_of(words)

    def _empty(self, n_rows: int) -> Words:
        """Return the words of a step in which nothing runs."""
        words = np.zeros(self._at_rows + n_rows * ROW_WORDS, dtype=np.int32)
        words[: self._at_blocks] = -1
        words[self._at_rows :].reshape(-1, ROW_WORDS)[:, :3] = FROM_SLOT
        return words
