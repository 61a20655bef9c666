"""Token by token or whole: the same text, and never half a character on the way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.detokenizer import Detokenizer
from server.text.tokenizer import load_tokenizer
from tests.unit.text.tokenizers_of import BYTE_KEYS, SP_KEYS, write_gguf

PROPERTY = settings(derandomize=True, deadline=None, max_examples=300)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("byte") / "m.gguf", BYTE_KEYS))


@pytest.fixture(scope="module")
def piece_tokenizer(tmp_path_factory):
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("piece") / "m.gguf", SP_KEYS))


def streamed(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ["byte_tokenizer", "piece_tokenizer"])
@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_give_the_text_of_all_of_them(kind, skip, request):
    tokenizer = request.getfixturevalue(kind)

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    @PROPERTY
    def check(ids):
        assert "".join(streamed(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip_special=skip)

    check()


@pytest.mark.parametrize("kind", ["byte_tokenizer", "piece_tokenizer"])
def test_texts_come_back_and_no_character_is_cut(kind, request):
    tokenizer = request.getfixturevalue(kind)

    @given(st.text(max_size=20).filter(lambda text: "\ufffd" not in text))
    @PROPERTY
    def check(text):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        pieces = streamed(tokenizer, ids, skip_special=True)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)

    check()


def test_a_character_comes_with_its_last_byte(byte_tokenizer):
    ids = byte_tokenizer.encode("é🎈", add_special=False, parse_special=False)
    assert streamed(byte_tokenizer, ids, skip_special=True) == ["", "é", "", "", "", "🎈", ""]


def test_bytes_that_are_no_text_are_shown_as_such_at_once_or_at_the_end(byte_tokenizer):
    first, second, lead = (byte_tokenizer.encode("é\u00ff", add_special=False, parse_special=False) * 2)[:3]
    assert streamed(byte_tokenizer, [second], skip_special=True) == ["\ufffd", ""]
    assert streamed(byte_tokenizer, [first], skip_special=True) == ["", "\ufffd"]
    assert streamed(byte_tokenizer, [lead, lead], skip_special=True) == ["", "\ufffd", "\ufffd"]


def test_only_the_start_of_a_sequence_loses_its_space(piece_tokenizer):
    ids = piece_tokenizer.encode("a b", add_special=False, parse_special=False)
    assert "".join(streamed(piece_tokenizer, ids, skip_special=True)) == "a b"
    assert "".join(streamed(piece_tokenizer, ids, skip_special=True, continues=True)) == " a b"


def test_special_tokens_are_shown_when_asked_for(byte_tokenizer):
    assert streamed(byte_tokenizer, [2], skip_special=True) == ["", ""]
    assert streamed(byte_tokenizer, [2], skip_special=False) == ["<|im_end|>", ""]
