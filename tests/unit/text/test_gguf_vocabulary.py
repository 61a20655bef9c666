"""Tokenizers of GGUF files: the ids of the libraries that made them, and files that hold no usable one named by key."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import ModelError
from server.text.gguf_vocabulary import load_gguf_vocabulary
from server.text.tokenizer import load_tokenizer
from tests.answers import load_hugging_face
from tests.unit.text.tokenizers_of import BYTE_KEYS, SP_KEYS, byte_level, sentencepiece, write_gguf

PROPERTY = settings(derandomize=True, deadline=None, max_examples=300)
TEXTS = st.text(st.sampled_from("abc éthein \n🎈1<|"), max_size=20)
KEYS = {"gpt2": BYTE_KEYS, "llama": SP_KEYS}


@pytest.fixture
def load(tmp_path):
    """Load a file with changed keys; None leaves a key out."""

    def run(kind="gpt2", changes=None, **more):
        keys = {key: value for key, value in (KEYS[kind] | (changes or {})).items() if value is not None}
        return load_gguf_vocabulary(write_gguf(tmp_path / "m.gguf", keys, **more))

    return run


@pytest.mark.parametrize(("kind", "backend"), [("gpt2", byte_level()), ("llama", sentencepiece())])
def test_ids_are_those_of_the_library(tmp_path, kind, backend):
    keys = KEYS[kind] | ({"pre": "gpt-2"} if kind == "gpt2" else {})
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", keys))

    @given(TEXTS)
    @PROPERTY
    def check(text):
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special=False) == text

    check()


def test_digits_are_split_off_where_the_pre_tokeniser_says_so(load):
    tokens = [*BYTE_KEYS["tokens"], "12"]
    changes = {"tokens": tokens, "token_type": [*BYTE_KEYS["token_type"], 1], "merges": [*BYTE_KEYS["merges"], "1 2"]}
    together = load(changes=changes | {"pre": "gpt-2"}).backend.encode("12").tokens
    apart = load(changes=changes | {"pre": "smollm"}).backend.encode("12").tokens
    assert (together, apart) == (["12"], ["1", "2"])


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "tekken"])
def test_words_of_the_vocabulary_are_taken_whole_where_the_pre_tokeniser_says_so(load, pre):
    tokens = [*BYTE_KEYS["tokens"], "Ġwhole"]
    vocabulary = load(changes={"tokens": tokens, "token_type": [*BYTE_KEYS["token_type"], 1], "pre": pre})
    assert vocabulary.backend.encode(" whole").tokens == ["Ġwhole"]
    assert vocabulary.prefix == (1,)  # these begin with bos also where the file does not say so


def test_characters_are_composed_where_the_pre_tokeniser_says_so(load):
    assert load(changes={"pre": "qwen2"}).backend.encode("e\u0301").ids == load().backend.encode("é").ids


class TestFacts:
    @pytest.mark.parametrize(
        ("changes", "prefix", "suffix"),
        [({}, (), ()), ({"add_bos_token": True}, (1,), ()), ({"add_eos_token": True}, (), (2,)),
         ({"add_bos_token": True, "bos_token_id": None}, (), ())],
    )  # fmt: skip
    def test_what_is_put_around_a_prompt(self, load, changes, prefix, suffix):
        vocabulary = load(changes=changes)
        assert (vocabulary.prefix, vocabulary.suffix) == (prefix, suffix)

    def test_sentencepiece_begins_with_bos_unless_told_not_to(self, load):
        assert load("llama").prefix == (1,)
        assert load("llama", {"add_bos_token": False}).prefix == ()

    def test_all_ends_of_a_turn_are_ends(self, load):
        vocabulary = load(changes={"eos_token_id": 0})
        assert vocabulary.eos_ids == (0, 2)  # <|im_end|> is in the vocabulary, too

    def test_ends_that_the_file_names_beside_eos(self, load):
        assert load("llama", {"eot_token_id": 5, "eom_token_id": 6}).eos_ids == (2, 5, 6)

    def test_special_and_control_tokens(self, load):
        vocabulary = load("llama")
        assert vocabulary.special_ids == {0, 1, 2}
        assert dict(vocabulary.control) == {"<s>": 1, "</s>": 2}

    def test_user_defined_markers_are_control_but_shown(self, load):
        kinds = [4 if i == 1 else kind for i, kind in enumerate(BYTE_KEYS["token_type"])]
        vocabulary = load(changes={"token_type": kinds})
        assert vocabulary.control["<|im_start|>"] == 1
        assert 1 not in vocabulary.special_ids

    def test_bytes_of_tokens(self, load):
        held = load("llama").token_bytes
        assert (held[3], held[3 + 0xC3], held[SP_KEYS["tokens"].index("▁ab")]) == (b"\0", b"\xc3", b" ab")

    def test_unused_tokens_have_no_text(self, load):
        kinds = [5 if i == 258 else kind for i, kind in enumerate(BYTE_KEYS["token_type"])]
        assert load(changes={"token_type": kinds}).token_bytes[258] == b""

    def test_without_types_all_tokens_are_normal(self, load):
        vocabulary = load(changes={"token_type": None})
        assert (vocabulary.special_ids, dict(vocabulary.control)) == (frozenset(), {})

    def test_the_space_before_a_text(self, load):
        assert load("llama").strip_leading_space
        plain = load("llama", {"add_space_prefix": False})
        assert not plain.strip_leading_space
        assert plain.backend.encode("a").tokens == ["a"]
        assert not load().strip_leading_space

    def test_templates_and_named_texts(self, load):
        vocabulary = load(**{"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"})
        assert (vocabulary.chat_template, vocabulary.tool_template) == ("a", "b")
        assert dict(vocabulary.texts) == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        assert load().chat_template is None


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("gpt2", {"tokens": None}, "'tokenizer.ggml.tokens' is missing, so the file holds no usable tokenizer"),
        ("gpt2", {"model": None}, "'tokenizer.ggml.model' is missing"),
        ("gpt2", {"model": "bert"}, "'tokenizer.ggml.model' is 'bert'; supported: gpt2, llama"),
        ("gpt2", {"model": 1}, "'tokenizer.ggml.model' is '1'; expected: str"),
        ("gpt2", {"token_type": [1, 1]}, "'tokenizer.ggml.token_type' has 2 entries for 268 tokens"),
        (
            "gpt2",
            {"pre": None},
            "'tokenizer.ggml.pre' is missing, and how to split words cannot be guessed; supported: gpt-2",
        ),
        ("gpt2", {"pre": "viking"}, "'tokenizer.ggml.pre' is 'viking'; supported: .*Hugging Face directory"),
        ("gpt2", {"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ("gpt2", {"merges": ["t h e"]}, "'tokenizer.ggml.merges' holds 't h e', which is not made of two tokens"),
        ("gpt2", {"merges": ["x y"]}, "holds 'x y'"),
        ("gpt2", {"eos_token_id": 268}, "'tokenizer.ggml.eos_token_id' is 268; expected: an id below 268"),
        ("gpt2", {"bos_token_id": "1"}, "'tokenizer.ggml.bos_token_id' is '1'; expected: int"),
        ("llama", {"scores": None}, "'tokenizer.ggml.scores' is missing"),
        ("llama", {"scores": [0.5]}, "'tokenizer.ggml.scores' has 1 entries for 272 tokens"),
        ("llama", {"unknown_token_id": 999}, "'tokenizer.ggml.unknown_token_id' is 999"),
        ("llama", {"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' is '1'; expected: bool"),
    ],
)
def test_what_cannot_be_used_is_named_by_file_and_key(load, tmp_path, kind, changes, told):
    with pytest.raises(ModelError, match=told) as caught:
        load(kind, changes)
    assert str(tmp_path / "m.gguf") in str(caught.value)


TEXTS_OF_ALL_KINDS = [
    "What is the capital of France?", "  two  spaces\n\n\nand lines\t", "it's I'LL we've", "1234567 12,345.67",
    "déjà vu Ünïcödé 日本語 🎈👩‍👩‍👧", "def f(x):\n    return x ** 2  # squared\n", "<|im_start|>user", "", " ", "\u00a0\u2003",
    "ΑΒΓ абв ابجد", "https://example.org/a?b=c&d=%20",
]  # fmt: skip


def test_the_real_model_s_ids_are_those_of_transformers(real_model_path):
    _, theirs = load_hugging_face(real_model_path)
    ours = load_tokenizer(real_model_path)
    for text in TEXTS_OF_ALL_KINDS:
        ids = ours.encode(text, add_special=False, parse_special=True)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special=False) == text
    assert ours.chat_template == theirs.chat_template
