"""Tokenizers of Hugging Face directories: what each small file says, and files that cannot be used named."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, processors

from server.errors import ModelError
from server.text.hf_vocabulary import load_hf_vocabulary
from server.text.tokenizer import load_tokenizer
from tests.unit.text.tokenizers_of import BYTE_TOKENS, MERGES, byte_level, sentencepiece, write_directory


@pytest.fixture
def load(tmp_path):
    def run(backend=None, **files):
        return load_hf_vocabulary(write_directory(tmp_path, backend or byte_level(), **files))

    return run


class TestKinds:
    def test_byte_level(self, load):
        vocabulary = load()
        assert vocabulary.byte_level
        assert not vocabulary.strip_leading_space
        assert (vocabulary.token_bytes[0], vocabulary.token_bytes[3 + 0xC3]) == (b"<|endoftext|>", b"\xc3")
        assert vocabulary.token_bytes[BYTE_TOKENS.index("Ġthe")] == b" the"

    def test_sentencepiece(self, load):
        vocabulary = load(sentencepiece())
        assert not vocabulary.byte_level
        assert vocabulary.strip_leading_space
        assert (vocabulary.token_bytes[3 + 10], vocabulary.token_bytes[263]) == (b"\n", b" a")
        assert dict(vocabulary.control) == {"<unk>": 0, "<s>": 1, "</s>": 2}

    @pytest.mark.parametrize(("scheme", "strips"), [("always", True), ("first", True), ("never", False)])
    def test_metaspace(self, load, scheme, strips):
        backend = Tokenizer(models.BPE(vocab={"▁a": 0}, merges=[]))
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        assert load(backend).strip_leading_space == strips

    def test_a_model_with_more_rows_than_tokens_has_empty_tokens(self, load):
        vocabulary = load(config={"vocab_size": 300})
        assert len(vocabulary.token_bytes) == 300
        assert vocabulary.token_bytes[299] == b""


class TestEnds:
    @pytest.mark.parametrize(
        ("files", "ids"),
        [
            ({}, ()),
            ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (2,)),
            ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}}, (2,)),
            ({"config": {"eos_token_id": 0}}, (0,)),
            ({"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [2, 0, 2]}}, (2, 0)),
            ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "generation_config": {"eos_token_id": [0, 2]}}, (2, 0)),
            ({"generation_config": {"eos_token_id": [2, 99999, -1, "x"]}}, (2,)),
            ({"tokenizer_config": {"eos_token": "unknown"}}, ()),
        ],
    )
    def test_all_files_that_name_one_are_asked(self, load, files, ids):
        assert load(**files).eos_ids == ids


class TestAroundAPrompt:
    @pytest.mark.parametrize(
        ("config", "prefix", "suffix"),
        [
            ({}, (), ()),
            ({"add_bos_token": True}, (), ()),
            ({"add_bos_token": True, "bos_token": "<|im_start|>"}, (1,), ()),
            ({"add_bos_token": False, "bos_token": "<|im_start|>"}, (), ()),
            ({"add_eos_token": True, "eos_token": "<|im_end|>"}, (), (2,)),
        ],
    )
    def test_the_tokenizer_s_configuration(self, load, config, prefix, suffix):
        vocabulary = load(tokenizer_config=config)
        assert (vocabulary.prefix, vocabulary.suffix) == (prefix, suffix)

    def test_else_the_post_processor(self, load):
        backend = byte_level()
        steps = {"single": "<|im_start|> $A <|im_end|>", "special_tokens": [("<|im_start|>", 1), ("<|im_end|>", 2)]}
        backend.post_processor = processors.TemplateProcessing(**steps)
        vocabulary = load(backend)
        assert (vocabulary.prefix, vocabulary.suffix, vocabulary.bos_id) == ((1,), (2,), None)


class TestTemplates:
    def test_a_file_of_its_own_comes_first(self, load, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("file")
        vocabulary = load(tokenizer_config={"chat_template": "config"})
        assert (vocabulary.chat_template, vocabulary.tool_template) == ("file", None)

    def test_with_another_for_tools_beside_it(self, load, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("file")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        assert load().tool_template == "tools"

    @pytest.mark.parametrize(
        ("files", "templates"),
        [
            ({}, (None, None)),
            ({"tokenizer_config": {"chat_template": "a"}}, ("a", None)),
            ({"chat_template": {"chat_template": "b"}}, ("b", None)),
            ({"tokenizer_config": {"chat_template": [{"name": "default", "template": "a"}]}}, ("a", None)),
            (
                {
                    "tokenizer_config": {
                        "chat_template": [{"name": n, "template": n[0]} for n in ("default", "tool_use")]
                    }
                },
                ("d", "t"),
            ),
            ({"tokenizer_config": {"chat_template": 1}}, (None, None)),
        ],
    )
    def test_else_the_configuration(self, load, files, templates):
        vocabulary = load(**files)
        assert (vocabulary.chat_template, vocabulary.tool_template) == templates


class TestWhatCannotBeUsed:
    @pytest.mark.parametrize(
        ("decoder", "told"),
        [
            (None, "it has no decoder; supported: ByteLevel"),
            (decoders.WordPiece(), "its decoder has a step 'WordPiece'"),
            (decoders.Sequence([decoders.Replace("_", " ")]), "its decoder replaces {'String': '_'} by ' '"),
        ],
    )
    def test_decoders_that_spell_tokens_otherwise(self, load, tmp_path, decoder, told):
        backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
        if decoder is not None:
            backend.decoder = decoder
        with pytest.raises(ModelError, match=told) as caught:
            load(backend)
        assert str(tmp_path / "tokenizer.json") in str(caught.value)

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff", b'{"decoder": 1}'])
    def test_a_damaged_tokenizer_file(self, tmp_path, data):
        (tmp_path / "tokenizer.json").write_bytes(data)
        with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be used"):
            load_hf_vocabulary(tmp_path)

    def test_a_truncated_tokenizer_file(self, tmp_path):
        write_directory(tmp_path, byte_level())
        whole = (tmp_path / "tokenizer.json").read_bytes()
        for part in range(1, 10):
            (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) * part // 10])
            with pytest.raises(ModelError):
                load_hf_vocabulary(tmp_path)

    def test_a_tokenizer_file_that_cannot_be_read(self, tmp_path):
        (tmp_path / "tokenizer.json").mkdir()
        with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
            load_hf_vocabulary(tmp_path)

    @pytest.mark.parametrize("name", ["config", "tokenizer_config", "generation_config"])
    @pytest.mark.parametrize(("text", "told"), [("{", "cannot be read"), ("[]", "holds no JSON object")])
    def test_damaged_files_beside_it(self, tmp_path, name, text, told):
        write_directory(tmp_path, byte_level())
        (tmp_path / f"{name}.json").write_text(text)
        with pytest.raises(ModelError, match=rf"{name}\.json: {told}"):
            load_hf_vocabulary(tmp_path)


class TestOlderFiles:
    """A directory without tokenizer.json: transformers converts what is there, in a process of its own."""

    def test_vocabulary_and_merges_are_converted(self, tmp_path):
        (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(BYTE_TOKENS)}))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in MERGES))
        config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": len(BYTE_TOKENS)}))
        tokenizer = load_tokenizer(tmp_path)
        text = "the he in é"
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert ids == byte_level().encode(text, add_special_tokens=False).ids
        assert tokenizer.eos_ids == (2,)

    def test_nothing_to_convert_is_told(self, tmp_path):
        with pytest.raises(ModelError, match=r"has no tokenizer\.json, and its tokenizer cannot be converted: \S+"):
            load_hf_vocabulary(tmp_path)

    def test_a_conversion_that_hangs_is_told(self, tmp_path, monkeypatch):
        monkeypatch.setattr("server.text.hf_vocabulary._CONVERT_WITHIN_S", 0.01)
        with pytest.raises(ModelError, match=r"converting took over 0\.01 s"):
            load_hf_vocabulary(tmp_path)
