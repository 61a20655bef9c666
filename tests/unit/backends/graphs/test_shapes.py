"""What a step needs, as what it runs, and what the device is told of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megakernel_runtime.backends.graphs.executor import Executor
from megakernel_runtime.backends.graphs.frame import FrameLayout, make_frame
from megakernel_runtime.backends.graphs.shapes import (
    BLOCK_ROWS,
    Shape,
    captured_shapes,
    largest_shapes,
    max_blocks,
    row_buckets,
    smallest_that_holds,
)
from megakernel_runtime.interface import SamplingParams
from megakernel_runtime.program.slots import Segment, Slot


def segment(index, start, count, length=None, tokens=None):
    tokens = tokens or list(range(100, 100 + (length or start + count)))
    slot = Slot(index, tokens, 1, SamplingParams(), start)
    return Segment(slot, start, count, start + count == len(tokens))


def test_buckets():
    assert row_buckets(1) == [1]
    assert row_buckets(128) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert row_buckets(100) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert row_buckets(2) == [1, 2]


@pytest.mark.parametrize(("needed", "rows"), [
    (Shape(1, 1, 0, 1, False), 1),
    (Shape(3, 3, 0, 3, False), 4),
    (Shape(3, 3, 0, 3, True), 4),
    (Shape(128, 128, 0, 128, False), 128),
    (Shape(9, 3, 1, 4, False), 16),
    (Shape(16, 0, 16, 16, False), 16),
    (Shape(300, 100, 30, 101, False), 384),
    (Shape(513, 1, 8, 2, False), None),  # a large step runs uncaptured
    (Shape(300, 0, 60, 60, False), None),  # so many short prompts too
])  # fmt: skip
def test_the_smallest_captured_shape_is_taken(needed, rows):
    shape = smallest_that_holds(captured_shapes(128, 2048), needed)
    assert (shape and shape.rows) == rows
    assert shape is None or (shape.holds(needed) and bool(shape.blocks) == bool(needed.blocks))


def test_captured_shapes_fit_what_was_allocated():
    for n_slots, n_tokens in ((1, 1), (4, 32), (128, 2048), (200, 512), (7, 700)):
        big = largest_shapes(n_slots, n_tokens)[0]
        for shape in captured_shapes(n_slots, n_tokens):
            assert shape.blocks <= big.blocks, (n_slots, n_tokens, shape)
            assert shape.rows <= max(n_tokens, n_slots)
            assert max(shape.spans, shape.outs) <= n_slots


def test_variants_have_names():
    assert Shape(8, 8, 0, 8, False).variant == "decode-8"
    assert Shape(64, 8, 9, 8, True).variant == "mixed-64-full"


lengths = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 150)), min_size=1, max_size=12)


@given(lengths)
def test_a_frame_says_all_of_its_rows(parts):
    segments = [segment(i, start, count, start + count + i % 2) for i, (start, count) in enumerate(parts)]
    frame = make_frame(segments, full=False)
    layout = FrameLayout(3000, max_blocks(16, 3000), 16, torch.device("cpu"))
    padded = Shape(frame.needs.rows + 5, 16, frame.needs.blocks + 3, 16, full=False)
    words = layout.fill(frame, padded)
    layout.words[: len(words)] = words
    seen = {}  # slot -> {position: token}
    by_block = {}
    for row, (slot, token, position, single) in enumerate(layout.rows[: padded.rows].tolist()):
        if slot < 0:
            assert row >= frame.needs.rows
            continue
        of = segments[slot]
        at = of.end - 1 if position < 0 else position
        seen.setdefault(slot, {})[at] = of.slot.tokens[at] if token < 0 else token
        by_block.setdefault(slot, []).append(row)
        assert bool(single) == (of.count == 1)
        assert not single or row < frame.needs.spans
    assert seen == {s.slot.index: {p: s.slot.tokens[p] for p in range(s.start, s.end)} for s in segments}
    blocks = [b for b in layout.blocks[: padded.blocks].tolist() if b[1]]
    assert len(blocks) == frame.needs.blocks
    covered = [row for first, count, _, _ in blocks for row in range(first, first + count)]
    assert covered == list(range(frame.needs.spans, frame.needs.rows))
    for first, count, slot, start in blocks:
        assert count <= BLOCK_ROWS
        assert start == segments[slot].start + first - by_block[slot][0]
    outs = layout.outs[: padded.outs].tolist()
    assert outs == [by_block[s.slot.index][-1] for s in segments if s.samples] + [-1] * (16 - frame.needs.outs)


def test_decode_steps_look_the_same_whatever_their_tokens():
    once = make_frame([segment(0, 4, 1), segment(2, 9, 1)], full=False)
    later = make_frame([segment(0, 5, 1, tokens=[1, 2, 3, 4, 5, -1]), segment(2, 10, 1)], full=False)
    assert once.key == later.key
    others = (
        [segment(2, 4, 1), segment(0, 9, 1)],  # another order
        [segment(0, 4, 1), segment(2, 9, 1, length=20)],  # in the middle of a prompt
        [segment(0, 4, 1)],
        [segment(0, 4, 1), segment(2, 9, 2)],
    )
    assert all(make_frame(other, full=False).key != once.key for other in others)


class Graph:
    n_kernels = 7

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


def test_the_executor_replays_what_is_captured_and_calls_the_rest():
    calls, graph, shape = [], Graph(), Shape(4, 4, 0, 4, full=False)
    executor = Executor(calls.append, {shape: graph})
    small, large = Shape(3, 3, 0, 2, full=False), Shape(5, 5, 0, 5, full=False)
    assert executor.run(executor.fit(small)) == 7
    assert (graph.replays, calls) == (1, [])
    assert executor.run(executor.fit(large)) == 0
    assert (graph.replays, calls) == (1, [large])
