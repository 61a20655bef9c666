"""The tokenizer as the API process uses it: one behaviour whatever files it came from."""

import pytest

from server.errors import ModelError
from server.text.tokenizer import load_tokenizer
from tests.unit.text.tokenizers_of import (
    BYTE_KEYS,
    SP_KEYS,
    byte_level,
    sentencepiece,
    write_directory,
    write_gguf,
)


@pytest.fixture(params=["directory", "gguf"])
def source(request):
    return request.param


@pytest.fixture
def byte_tokenizer(source, tmp_path):
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": True, "add_eos_token": True}
    if source == "directory":
        return load_tokenizer(write_directory(tmp_path, byte_level(), tokenizer_config=named))
    return load_tokenizer(write_gguf(tmp_path / "m.gguf", BYTE_KEYS | {"add_bos_token": True, "add_eos_token": True}))


@pytest.fixture
def piece_tokenizer(source, tmp_path):
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    if source == "directory":
        return load_tokenizer(write_directory(tmp_path, sentencepiece(), tokenizer_config=named))
    return load_tokenizer(write_gguf(tmp_path / "m.gguf", SP_KEYS))


def test_both_sources_say_the_same(byte_tokenizer, piece_tokenizer):
    assert (byte_tokenizer.bos_id, byte_tokenizer.eos_ids[0], byte_tokenizer.vocab_size) == (1, 2, 268)
    assert byte_tokenizer.special_ids == {0, 1, 2}
    assert dict(byte_tokenizer.control) == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert (piece_tokenizer.bos_id, piece_tokenizer.eos_ids, piece_tokenizer.vocab_size) == (1, (2,), 272)
    assert dict(piece_tokenizer.texts) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (piece_tokenizer.strip_leading_space, byte_tokenizer.strip_leading_space) == (True, False)
    assert (piece_tokenizer.chat_template, piece_tokenizer.tool_template) == (None, None)


def test_special_tokens_around_a_prompt(byte_tokenizer):
    plain = byte_tokenizer.encode("the", add_special=False, parse_special=False)
    assert byte_tokenizer.encode("the", add_special=True, parse_special=False) == [1, *plain, 2]


def test_control_tokens_in_a_text_are_read_only_when_asked(byte_tokenizer):
    assert byte_tokenizer.encode("<|im_end|>", add_special=False, parse_special=True) == [2]
    spelled = byte_tokenizer.encode("<|im_end|>", add_special=False, parse_special=False)
    assert 2 not in spelled
    assert byte_tokenizer.decode(spelled, skip_special=True) == "<|im_end|>"


@pytest.mark.parametrize("text", ["ab abc", " a", "é\n", "", "  "])
def test_texts_come_back(piece_tokenizer, text):
    ids = piece_tokenizer.encode(text, add_special=False, parse_special=False)
    assert piece_tokenizer.decode(ids, skip_special=True) == text


def test_special_tokens_may_be_left_out_of_a_text(byte_tokenizer):
    assert byte_tokenizer.decode([1, 2], skip_special=True) == ""
    assert byte_tokenizer.decode([1, 2], skip_special=False) == "<|im_start|><|im_end|>"


@pytest.mark.parametrize("token", [-1, 268])
def test_ids_outside_the_vocabulary_are_refused(byte_tokenizer, token):
    with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 268 tokens"):
        byte_tokenizer.decode([token], skip_special=True)


def test_a_part_of_a_character_shows_as_such(byte_tokenizer):
    assert (byte_tokenizer.token_text(3 + 0xC3), byte_tokenizer.token_bytes(3 + 0xC3)) == ("\ufffd", b"\xc3")


def test_a_path_that_is_neither_is_told(tmp_path):
    with pytest.raises(ModelError, match="no such file or directory, so no tokenizer can be read"):
        load_tokenizer(tmp_path / "none")


@pytest.mark.parametrize("part", ["the", " ", "é", "<|im_end|>", "e\u0301\u0323", "x"])
def test_no_text_is_longer_than_its_tokens_may_be(byte_tokenizer, piece_tokenizer, part):
    for tokenizer in (byte_tokenizer, piece_tokenizer):
        n_tokens = len(tokenizer.encode(part * 50, add_special=False, parse_special=True))
        assert len(part.encode()) * 50 <= tokenizer.most_bytes(n_tokens)
        assert tokenizer.most_bytes(10) == 10 * tokenizer.most_bytes(1)
