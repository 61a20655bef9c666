"""The plan contract at the level of one slot: every breach is refused by name, every finish is found."""

import pytest

from megakernel_runtime.interface import FinishReason, PageGrant, PrefillRow, RuntimeFault, SamplingParams, SlotAdmit
from megakernel_runtime.program.slots import SlotTable
from tests.program.programs import decode, prefill

GREEDY = SamplingParams(temperature=0, max_tokens=3, stop_token_ids=(9,))


def table(max_len=32):
    return SlotTable(2, 4, 8, max_len)


def admitted(n=6, *, sampling=GREEDY, pages=(0, 1), max_len=32, **kw):
    slots = table(max_len)
    slots.admit(SlotAdmit(0, tuple(range(10, 10 + n)), kw.pop("prompt_len", n), sampling, pages=pages, **kw))
    return slots


@pytest.mark.parametrize(
    ("admit", "says"),
    [
        (SlotAdmit(2, (1,), 1, GREEDY), "slot 2 does not exist; there are slots 0 to 1"),
        (SlotAdmit(-1, (1,), 1, GREEDY), "slot -1 does not exist"),
        (SlotAdmit(0, (), 0, GREEDY), "given 0 tokens; between 1 and 32 fit"),
        (SlotAdmit(0, (1,) * 33, 33, GREEDY), "given 33 tokens"),
        (SlotAdmit(0, (1, 2), 3, GREEDY), "has 2 tokens, of which 3 are its prompt"),
        (SlotAdmit(0, (1, 2), 0, GREEDY), "of which 0 are its prompt"),
        (SlotAdmit(0, (1,) * 6, 6, GREEDY, cached_len=3, pages=(0,)), "3 of 6 tokens cached"),
        (SlotAdmit(0, (1,) * 4, 4, GREEDY, cached_len=4, pages=(0,)), "4 of 4 tokens cached"),
        (SlotAdmit(0, (1,) * 9, 9, GREEDY, cached_len=8, pages=(0,)), "8 tokens cached, 1 pages"),
        (SlotAdmit(0, (1,), 1, GREEDY, pages=(8,)), "page 8; there are 0 to 7"),
    ],
)
def test_admissions_that_cannot_be(admit, says):
    with pytest.raises(RuntimeFault, match=says):
        table().admit(admit)


def test_a_slot_is_taken_until_released():
    slots = admitted()
    with pytest.raises(RuntimeFault, match="slot 0 is taken"):
        slots.admit(SlotAdmit(0, (1,), 1, GREEDY))
    slots.release(0)
    slots.admit(SlotAdmit(0, (1,), 1, GREEDY))
    for breach in (
        lambda: slots.release(1),
        lambda: slots.decode(1),
        lambda: slots.prefill(PrefillRow(1, 0, 1)),
        lambda: slots.grant(PageGrant(1, (0,))),
        lambda: slots.has_room(1),
    ):
        with pytest.raises(RuntimeFault, match="slot 1 is free"):
            breach()


@pytest.mark.parametrize("row", [PrefillRow(0, 1, 2), PrefillRow(0, 0, 0), PrefillRow(0, 0, 7)])
def test_prefill_rows_continue_where_the_slot_is(row):
    with pytest.raises(RuntimeFault, match=r"computed 0 of 6"):
        admitted().prefill(row)


def test_rows_need_pages():
    slots = admitted(10)
    with pytest.raises(RuntimeFault, match="needs the KV of 10 tokens but has 2 pages of 4"):
        prefill(slots, 0, 0, 10)
    slots.grant(PageGrant(0, (5,)))
    assert prefill(slots, 0, 0, 10).samples


def test_a_chunk_samples_only_at_the_end():
    slots = admitted()
    first = prefill(slots, 0, 0, 4)
    assert (first.start, first.count, first.end, first.samples) == (0, 4, 4, False)
    assert slots.advance(first, None) is None
    with pytest.raises(RuntimeFault, match="cannot decode: it has computed 4 of 6"):
        slots.decode(0)
    rest = prefill(slots, 0, 4, 2)
    assert rest.samples
    slots.advance(rest, 30)
    row = decode(slots, 0)
    assert (row.start, row.count, row.samples) == (6, 1, True)
    assert row.slot.tokens[-1] == 30
    assert row.slot.n_generated == 1


def test_cached_tokens_are_not_computed_again():
    slots = admitted(cached_len=4)
    with pytest.raises(RuntimeFault):
        prefill(slots, 0, 0, 6)
    assert prefill(slots, 0, 4, 2).samples


def run(slots, tokens):
    """Prefill all, then decode; return the finish after each token."""
    segment = prefill(slots, 0, 0, 6)
    finishes = []
    for token in tokens:
        finishes.append(slots.advance(segment, token))
        slots.check_integrity()
        if finishes[-1] is None:
            segment = decode(slots, 0)
    assert (slots.decode(0) is None) == (finishes[-1] is not None) == slots.is_finished(0)
    return finishes


def test_finish_by_length():
    assert run(admitted(), [30, 31, 32]) == [None, None, FinishReason.LENGTH]


def test_finish_by_stop_goes_before_length():
    assert run(admitted(), [30, 9]) == [None, FinishReason.STOP]
    assert run(admitted(), [30, 31, 9]) == [None, None, FinishReason.STOP]


def test_a_full_context_is_length():
    p = SamplingParams(temperature=0, max_tokens=100)
    assert run(admitted(sampling=p, max_len=8), [30, 31]) == [None, FinishReason.LENGTH]


def test_what_was_generated_before_a_preemption_counts():
    assert run(admitted(prompt_len=4), [30]) == [FinishReason.LENGTH]


def test_a_stop_token_that_was_masked_does_not_finish():
    p = SamplingParams(temperature=0, max_tokens=9, min_tokens=1, stop_token_ids=(9,), allowed_token_ids=(9,))
    assert run(admitted(sampling=p), [9, 9]) == [None, FinishReason.STOP]


def test_finished_slots_give_no_rows():
    slots = admitted()
    run(slots, [9])
    assert slots.prefill(PrefillRow(0, 6, 1)) is None


def test_room():
    slots = admitted(8)
    segment = prefill(slots, 0, 0, 8)
    assert slots.has_room(0)
    slots.advance(segment, 30)
    assert not slots.has_room(0)


def test_integrity_check_finds_a_page_held_twice():
    slots = admitted()
    slots.check_integrity()
    slots.grant(PageGrant(0, (1,)))
    with pytest.raises(AssertionError, match="slot 0 has a page twice"):
        slots.check_integrity()
