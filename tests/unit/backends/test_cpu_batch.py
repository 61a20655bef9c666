"""How rows are grouped, what each group looks at, and that nothing grows with what a context could be."""

import pytest
import torch

from megakernel_runtime.backends.cpu.batch import BatchMaker
from megakernel_runtime.interface import PageGrant, PrefillRow, SamplingParams, SlotAdmit
from megakernel_runtime.program.slots import SlotTable

PAGE, N_PAGES = 4, 4096
ENDLESS = SamplingParams(max_tokens=99)


class Slots(SlotTable):
    """Slots that can be put at any context length."""

    def __init__(self):
        super().__init__(8, PAGE, N_PAGES, PAGE * 512)

    def decoding(self, index, context):
        """A row that sees `context` tokens, the last of them its own; page i of slot s is 512 s + i, reversed."""
        n_pages = -(-context // PAGE)
        pages = tuple(512 * index + i for i in reversed(range(n_pages)))
        self.admit(SlotAdmit(index, tuple(range(context)), context, ENDLESS, pages=pages))
        return self.prefill(PrefillRow(index, 0, context))

    def last(self, index, context):
        segment = self.decoding(index, context)
        assert segment is not None
        self.advance(segment, 7)
        if context % PAGE == 0:
            self.grant(PageGrant(index, (512 * index + 500,)))
        row = self.decode(index)
        assert row is not None
        return row


def make(segments, window=None):
    return BatchMaker(8, 512, PAGE, window, torch.float32).make(segments)


def test_decode_rows_of_similar_context_share_a_group():
    slots = Slots()
    batch = make([slots.last(i, context) for i, context in enumerate((100, 1500, 90, 700, 201))])
    assert [[s.end for s in batch.segments[g.rows]] for g in batch.groups] == [[91, 101, 202], [701], [1501]]
    assert [g.context for g in batch.groups] == [202, 701, 1501]
    assert [g.n_contexts for g in batch.groups] == [3, 1, 1]
    assert batch.kv_tokens == 3 * 202 + 701 + 1501
    assert batch.sampled is None


def test_padding_is_bounded():
    slots = Slots()
    contexts = (3, 17, 130, 131, 132, 400, 900, 2000)
    batch = make([slots.last(i, context) for i, context in enumerate(contexts)])
    needed = sum(context + 1 for context in contexts)
    assert batch.kv_tokens <= 2 * needed + 128 * len(contexts)
    for group in batch.groups:
        ends = [s.end for s in batch.segments[group.rows]]
        assert max(ends) <= max(2 * min(ends), min(ends) + 128)


def test_groups_name_pages_in_order_and_hide_what_is_not_theirs():
    slots = Slots()
    batch = make([slots.last(1, 6), slots.last(0, 9)])
    (group,) = batch.groups
    pages = group.pages.view(2, -1)
    assert pages[0, :2].tolist() == [513, 512]  # slot 1 is shorter and comes first
    assert pages[1].tolist() == [2, 1, 0]
    assert group.mask is not None
    seen = group.mask[:, 0, 0] == 0
    assert seen.sum(-1).tolist() == [7, 10]
    assert bool(seen[0, :7].all())
    assert torch.isneginf(group.mask[0, 0, 0, 7:]).all()


def test_a_single_decode_row_needs_no_mask():
    (group,) = make([Slots().last(0, 9)]).groups
    assert group.mask is None
    assert group.context == 10


def test_chunks_follow_and_sample_only_at_their_end():
    slots = Slots()
    slots.admit(SlotAdmit(3, tuple(range(20)), 20, ENDLESS, pages=(9, 8, 7, 6, 5)))
    slots.admit(SlotAdmit(4, tuple(range(6)), 6, ENDLESS, pages=(19, 18)))
    part, whole = slots.prefill(PrefillRow(3, 0, 8)), slots.prefill(PrefillRow(4, 0, 6))
    batch = make([part, slots.last(0, 4), whole])
    assert [s.slot.index for s in batch.segments] == [0, 3, 4]
    assert [(g.rows.start, g.rows.stop, g.chunk) for g in batch.groups] == [(0, 1, False), (1, 9, True), (9, 15, True)]
    assert batch.sampled is not None
    assert batch.sampled.tolist() == [0, 14]
    assert batch.tokens.tolist() == [7, *range(8), *range(6)]
    assert batch.positions.tolist() == [4, *range(8), *range(6)]
    assert batch.places.tolist() == [500 * 4, 36, 37, 38, 39, 32, 33, 34, 35, 76, 77, 78, 79, 72, 73]
    mask = batch.groups[2].mask
    assert mask is not None
    assert (mask == 0).sum(-1).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("context", [5, 6, 7, 40, 1501])
def test_windows_limit_the_pages_that_are_looked_at(context):
    (group,) = make([Slots().last(0, context)], window=6).groups
    assert group.context <= 6 + PAGE
    assert group.mask is not None
    assert int((group.mask == 0).sum()) == min(6, context + 1)
    assert bool((group.mask[..., -1] == 0).all())


def test_a_slot_that_is_taken_again_has_new_pages():
    slots = Slots()
    maker = BatchMaker(8, 512, PAGE, None, torch.float32)
    maker.make([slots.last(0, 9)])
    slots.release(0)
    slots.admit(SlotAdmit(0, (1, 2), 2, ENDLESS, pages=(77,)))
    segment = slots.prefill(PrefillRow(0, 0, 2))
    assert segment is not None
    assert maker.make([segment]).places.tolist() == [77 * 4, 77 * 4 + 1]
