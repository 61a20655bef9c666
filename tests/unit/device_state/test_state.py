import pytest
import torch

from megakernel_runtime.device_state.fields import PROMPT_COUNT, Field
from megakernel_runtime.device_state.state import SlotState
from megakernel_runtime.interface import RuntimeFault, SamplingParams
from megakernel_runtime.program.slots import Slot

VOCAB = 100


def state(**kw):
    return SlotState(
        **(
            {
                "max_slots": 3,
                "page_size_tokens": 7,
                "vocab_size": VOCAB,
                "max_model_len_tokens": 40,
                "device": torch.device("cpu"),
            }
            | kw
        )
    )


def write(s):
    update = s.take()
    addresses = update.addresses.tolist()
    assert len(set(addresses)) == len(addresses), "an address twice: whoever writes last wins"
    for first, n in update.clears:
        s.arena[first : first + n] = 0
    s.arena[torch.tensor(addresses, dtype=torch.long)] = torch.from_numpy(update.words)
    return len(addresses)


def slot(index=1, tokens=(1, 2, 3), prompt_len=2, pages=(4, 5), **sampling):
    return Slot(index, list(tokens), prompt_len, SamplingParams(**({"max_tokens": 9} | sampling)), 0, list(pages))


def bits(mask):
    return {32 * w + b for w, word in enumerate(mask.tolist()) for b in range(32) if word >> b & 1}


def test_admission_writes_what_kernels_read():
    s = state()
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 2**64 - 3, "top_k": 7, "min_p": 0.25}
    s.sync([slot(stop_token_ids=(31, 99, 640), min_tokens=4, **sampling)])
    write(s)
    f = s.fields[1]
    expected = {
        Field.TOKEN: 3,
        Field.POSITION: 2,
        Field.GENERATED: 1,
        Field.LIVE: 1,
        Field.LIMIT: 9,
        Field.MIN_TOKENS: 4,
        Field.BAN_UNTIL: 4,
        Field.FLAGS: 0,
        Field.TOP_K: 7,
        Field.N_TOP: -1,
    }
    assert {field: f[field].item() for field in expected} == expected
    assert f.view(torch.float32)[[Field.TEMPERATURE, Field.MIN_P]].tolist() == [0.5, 0.25]
    assert f.view(torch.float64)[Field.TOP_P // 2].item() == 0.9
    low, high = (f[i].item() & 0xFFFFFFFF for i in (Field.SEED_LOW, Field.SEED_HIGH))
    assert high << 32 | low == 2**64 - 3
    assert s.pages[1, :2].tolist() == [4, 5]
    assert bits(s.stops[1]) == {31, 99}  # 640 is outside the vocabulary: never chosen
    assert bits(s.allowed[1]) == set()
    assert not s.fields[[0, 2]].any()


@pytest.mark.parametrize(("sampling", "field", "value"), [
    ({"top_k": VOCAB}, Field.TOP_K, 0),
    ({"max_tokens": 1000}, Field.LIMIT, 38),
    ({"top_logprobs": 5}, Field.N_TOP, 5),
    ({"min_tokens": 3}, Field.BAN_UNTIL, 0),
    ({"min_tokens": 3, "stop_token_ids": (4,), "allowed_token_ids": (4,)}, Field.BAN_UNTIL, 0),
    ({"min_tokens": 3, "stop_token_ids": (4,), "allowed_token_ids": (4, 5)}, Field.BAN_UNTIL, 3),
])  # fmt: skip
def test_fields_of_special_cases(sampling, field, value):
    s = state()
    s.sync([slot(**sampling)])
    write(s)
    assert s.fields[1, field].item() == value


def test_only_news_are_written():
    s, first = state(), slot()
    s.sync([first])
    assert write(s) > 30
    s.sync([first])
    assert write(s) == 0
    first.pages += [9, 8]
    s.sync([first])
    assert write(s) == 3
    assert s.pages[1, :4].tolist() == [4, 5, 9, 8]


def test_the_next_owner_finds_nothing_of_the_last():
    s = state()
    s.sync([slot(stop_token_ids=(3, 40), allowed_token_ids=(5, 70), logit_bias=((8, 2.0),), presence_penalty=1.0)])
    write(s)
    s.sync(
        [slot(tokens=(50, 51, 51), pages=(7,), stop_token_ids=(40,), logit_bias=((9, -1.0),), frequency_penalty=0.5)]
    )
    write(s)
    assert bits(s.stops[1]) == {40}
    assert bits(s.allowed[1]) == set()
    assert s.pages[1, 0].item() == 7
    assert {i: v for i, v in enumerate(s.bias[1].tolist()) if v} == {9: -1.0}
    assert {i: v for i, v in enumerate(s.counts[1].tolist()) if v} == {50: PROMPT_COUNT, 51: PROMPT_COUNT + 1}


def test_repeated_bias_adds_up():
    s = state()
    s.sync([slot(logit_bias=((3, 1.0), (5, 2.0), (3, 0.5)))])
    write(s)
    assert s.bias[1, [3, 5]].tolist() == [1.5, 2.0]


@pytest.mark.parametrize(("sampling", "full"), [
    ({}, False),
    ({"temperature": 0.0, "top_k": 3}, False),
    ({"stop_token_ids": (3,)}, False),
    ({"top_logprobs": 0}, True),
    ({"repetition_penalty": 1.1}, True),
    ({"logit_bias": ((1, 1.0),)}, True),
    ({"allowed_token_ids": (1,)}, True),
    ({"stop_token_ids": (3,), "min_tokens": 2}, True),
    ({"stop_token_ids": (3,), "min_tokens": 1}, False),  # one was generated
])  # fmt: skip
def test_who_needs_the_full_sampler(sampling, full):
    s, one = state(), slot(**sampling)
    assert s.sync([one]) is full
    assert s.sync([slot(index=0), one]) is full


@pytest.mark.parametrize(("changes", "says"), [
    ({"tokens": (1, 100, 3)}, "slot 1 has token 100; there are 0 to 99"),
    ({"tokens": (-1, 1, 3)}, "slot 1 has token -1"),
    ({"allowed_token_ids": (1, 100)}, "slot 1 has allowed token 100"),
    ({"logit_bias": ((100, 1.0),)}, "slot 1 has biased token 100"),
])  # fmt: skip
def test_what_lies_outside_the_vocabulary_is_a_fault(changes, says):
    with pytest.raises(RuntimeFault, match=says):
        state().sync([slot(**changes)])


def test_updates_are_words_of_the_arena():
    s = state()
    assert (len(s.take().addresses), s.take().clears) == (0, ())
    s.sync([slot(presence_penalty=1.0, logit_bias=((3, 1.0),))])
    update = s.take()
    assert update.words.dtype == update.addresses.dtype == "int32"
    assert update.addresses.max() < len(s.arena)
    assert [n for _, n in update.clears] == [VOCAB, VOCAB]
    assert all(first + n <= len(s.arena) for first, n in update.clears)


def test_room_grows_with_the_page_table():
    s = state()
    owner = slot(pages=(4, 5))
    s.sync([owner])
    write(s)
    assert s.fields[1, Field.ROOM] == 14
    owner.pages.append(0)
    s.sync([owner])
    write(s)
    assert s.fields[1, Field.ROOM] == 21
    assert s.pages[1, :3].tolist() == [4, 5, 0]


def test_forgotten_slots_are_written_anew():
    s = state()
    owner = slot(stop_token_ids=(31,))
    s.sync([owner])
    write(s)
    s.fields[1, Field.TOKEN] = 77
    s.fields[1, Field.LIVE] = 0
    s.forget()
    s.sync([owner])
    write(s)
    assert s.fields[1, [Field.TOKEN, Field.LIVE]].tolist() == [3, 1]
    assert bits(s.stops[1]) == {31}
