"""Small tokenizers of both kinds, as the libraries make them, as Hugging Face directories and as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from server.text.vocabulary import CODE_POINT_OF_BYTE

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("Ġthe", "he", "Ġt", "in", "Ġ<", "th", "<|", "|>", "im")
MERGES = (("t", "h"), ("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("i", "n"), ("i", "m"), ("<", "|"), ("|", ">"), ("Ġ", "<"))
ALPHABET = [chr(CODE_POINT_OF_BYTE[byte]) for byte in range(256)]
BYTE_TOKENS = [*CONTROL, *ALPHABET, *WORDS]

PIECES = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "▁abc", "é", "▁b", "▁▁"]
SP_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "[INST]"]
SP_SCORES = [0.0] * 259 + [-float(10 + i) for i in range(len(PIECES))] + [0.0]
SP_MERGES = [
    ("b", "c"),
    ("a", "b"),
    ("▁", "a"),
    ("▁", "b"),
    ("▁a", "b"),
    ("▁", "ab"),
    ("▁ab", "c"),
    ("▁a", "bc"),
    ("▁", "▁"),
]


def byte_level(control=CONTROL):
    """GPT-2's kind: bytes, a few merges, control tokens first."""
    ids = {token: i for i, token in enumerate(BYTE_TOKENS)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return backend


def sentencepiece():
    """Llama 2's kind: pieces with a visible space, bytes for what no piece spells."""
    ids = {token: i for i, token in enumerate(SP_TOKENS)}
    merges = [pair for pair in SP_MERGES if "".join(pair) in ids]
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    for text in ("<unk>", "<s>", "</s>"):
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    backend.add_tokens([AddedToken("[INST]", special=False, normalized=False)])
    return backend


def write_directory(path: Path, backend, **files):
    """Write a Hugging Face directory: tokenizer.json, and JSON files by name (`_` stands for the dot)."""
    backend.save(str(path / "tokenizer.json"))
    for name, value in ({"config": {"vocab_size": backend.get_vocab_size()}} | files).items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


BYTE_KEYS = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": BYTE_TOKENS,
    "token_type": [3] * len(CONTROL) + [1] * (len(ALPHABET) + len(WORDS)),
    "merges": [" ".join(pair) for pair in MERGES],
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SP_KEYS = {
    "model": "llama",
    "tokens": SP_TOKENS,
    "scores": SP_SCORES,
    "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def write_gguf(path: Path, keys, **more):
    """Write a GGUF file without tensors: `keys` are those of its tokenizer (None: left out), `more` any others."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    for name, value in ({f"tokenizer.ggml.{key}": value for key, value in keys.items()} | more).items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
