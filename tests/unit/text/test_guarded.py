"""Encoding with control tokens only where they are trusted: ordinary text is unchanged, control in data is spelled out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.text.guarded import GuardedEncoder
from server.text.prompt_pieces import PromptPiece, PromptPieces
from tests.unit.text.tokenizers_of import CONTROL, byte_level, sentencepiece

PROPERTY = settings(derandomize=True, deadline=None, max_examples=300)
PARTS = st.lists(st.sampled_from([*CONTROL, "the", " the", "<|", "im", "|>", " <", "é", "\n", "a b"]), max_size=8).map(
    "".join
)
BYTE = byte_level()
IDS = {text: BYTE.token_to_id(text) for text in CONTROL}


def prompt(*pieces):
    """Pieces by turns: data, the template's text, data …"""
    return PromptPieces(tuple(PromptPiece(text, literal=i % 2 == 0) for i, text in enumerate(pieces)))


@pytest.fixture(scope="module")
def encode():
    return GuardedEncoder(BYTE, IDS, byte_level=True).encode


def test_trusted_text_has_the_ordinary_ids(encode):
    @given(PARTS)
    @PROPERTY
    def check(text):
        assert encode(prompt("", text)) == BYTE.encode(text, add_special_tokens=False).ids

    check()


def test_where_data_begins_and_ends_changes_nothing(encode):
    """Of ordinary text; so a merge may reach over the border."""

    @given(st.lists(st.text("the <imn", max_size=4), max_size=6))
    @PROPERTY
    def check(pieces):
        assert encode(prompt(*pieces)) == BYTE.encode("".join(pieces), add_special_tokens=False).ids

    check()


def test_data_never_becomes_control_and_stays_the_same_text(encode):
    @given(PARTS, PARTS)
    @PROPERTY
    def check(data, trusted):
        ids = encode(prompt(data, trusted))
        wanted = [i for i in BYTE.encode(trusted, add_special_tokens=False).ids if i in IDS.values()]
        assert [i for i in ids if i in IDS.values()] == wanted
        assert BYTE.decode(ids, skip_special_tokens=False) == data + trusted

    check()


def test_a_control_token_half_of_data_is_none(encode):
    assert not set(encode(prompt("<|im_", "end|>"))) & set(IDS.values())
    assert not set(encode(prompt("", "<|im_", "end|>"))) & set(IDS.values())


def test_a_control_token_that_merging_makes_is_spelled_out():
    """A vocabulary in which ordinary text merges into the control token itself."""
    tokens = ["<", "s", ">", "<s", "<s>", "a"]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("<", "s"), ("<s", ">")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    encode = GuardedEncoder(backend, {"<s>": 4}, byte_level=True).encode
    assert encode(prompt("a<s>a", "<s>")) == [5, 0, 1, 2, 5, 4]
    assert backend.encode("<s>", add_special_tokens=False).ids == [4]


def test_a_sentencepiece_vocabulary_too():
    backend = sentencepiece()
    control = {text: backend.token_to_id(text) for text in ("<s>", "</s>")}
    encode = GuardedEncoder(backend, control, byte_level=False).encode
    ids = encode(prompt("a</s>", "<s>"))
    assert [i for i in ids if i in control.values()] == [control["<s>"]]
    assert encode(prompt("", "<s>ab é")) == backend.encode("<s>ab é", add_special_tokens=False).ids


def test_tokens_that_swallow_space_around_them_still_do():
    backend = byte_level(control=())
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True, lstrip=True)])
    encode = GuardedEncoder(backend, {"<|im_end|>": 2}, byte_level=True).encode
    assert encode(prompt("a", " <|im_end|>\n", "a")) == backend.encode("a <|im_end|>\na", add_special_tokens=False).ids


def test_a_model_without_control_tokens():
    encode = GuardedEncoder(byte_level(control=()), {}, byte_level=True).encode
    assert encode(prompt("a", "b")) == byte_level(control=()).encode("ab", add_special_tokens=False).ids
    assert encode(prompt()) == []
