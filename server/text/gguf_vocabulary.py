"""Reads the tokenizer that a GGUF file carries in its metadata.

Byte-level BPE ("gpt2") needs the name of its pre-tokeniser, since the file does not hold the rule itself; SentencePiece
BPE ("llama") holds scores, from which the order of merges follows. Must not know: tensors, prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from server.errors import ModelError
from server.text.gguf_metadata import Value, read_metadata
from server.text.vocabulary import (
    METASPACE,
    Vocabulary,
    add_tokens,
    byte_level_bytes,
    looks_like_marker,
    sentencepiece_bytes,
)

_P = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # gguf's token types
# Ends of a turn or a text in the supported families: a file names one of them as its end, models produce all of theirs.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_T = TypeVar("_T")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """A pre-tokeniser: GPT-2's own rule where `pattern` is None, after splitting off single digits where asked."""

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False  # a word that is in the vocabulary is taken whole, whatever the merges say
    nfc: bool = False
    bos: bool = False  # whether prompts begin with bos when the file does not say


_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "starcoder": _Split(single_digits=True),
    "llama-bpe": _Split(_LLAMA3, whole_words=True, bos=True),
    "llama3": _Split(_LLAMA3, whole_words=True, bos=True),
    "llama-v3": _Split(_LLAMA3, whole_words=True, bos=True),
    "qwen2": _Split(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Split(_QWEN2),
    "tekken": _Split(_TEKKEN, whole_words=True, bos=True),
}


class _Keys:
    """Typed access to the metadata of one file."""

    def __init__(self, path: Path, pairs: dict[str, Value]) -> None:
        self.path = path
        self._pairs = pairs

    def error(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.path}: metadata key '{_P}{key}' {what}")

    def optional(self, key: str, kind: type[_T]) -> _T | None:
        value = self._pairs.get(_P + key)
        if value is not None and not isinstance(value, kind):
            raise self.error(key, f"is {str(value)[:60]!r}; expected: {kind.__name__}")
        return value

    def required(self, key: str, kind: type[_T]) -> _T:
        if (value := self.optional(key, kind)) is None:
            raise self.error(key, "is missing, so the file holds no usable tokenizer")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self.optional(key, int)
        if value is not None and not 0 <= value < vocab_size:
            raise self.error(key, f"is {value}; expected: an id below {vocab_size}")
        return value

    def template(self, key: str) -> str | None:
        value = self._pairs.get(key)
        return value if isinstance(value, str) else None


def load_gguf_vocabulary(path: Path) -> Vocabulary:
    """Return the tokenizer of a GGUF file. Raises ModelError, naming the key, for what is missing or not supported."""
    keys = _Keys(path, read_metadata(path, ("tokenizer.",)))
    tokens = cast("list[str]", keys.required("tokens", list))
    kinds = cast("list[int]", keys.optional("token_type", list)) or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise keys.error("token_type", f"has {len(kinds)} entries for {len(tokens)} tokens")
    model = keys.required("model", str)
    if model == "gpt2":
        split = _split(keys)
        backend, spelled, bos = _byte_level(keys, tokens, split), byte_level_bytes, split.bos
    elif model == "llama":
        backend, spelled, bos = _sentencepiece(keys, tokens, kinds), sentencepiece_bytes, True
    else:
        raise keys.error("model", f"is {model!r}; supported: gpt2, llama")
    add_tokens(backend, _added(tokens, kinds))
    return _vocabulary(keys, tokens, kinds, backend, spelled, default_bos=bos)


def _vocabulary(
    keys: _Keys,
    tokens: list[str],
    kinds: list[int],
    backend: Backend,
    spelled: Callable[[str], bytes],
    *,
    default_bos: bool,
) -> Vocabulary:
    n = len(tokens)
    bos, eos = keys.token_id("bos_token_id", n), keys.token_id("eos_token_id", n)
    named = {"bos_token": bos, "eos_token": eos, "unk_token": keys.token_id("unknown_token_id", n)}
    named["pad_token"] = keys.token_id("padding_token_id", n)
    control = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == _CONTROL}
    ends = [eos, keys.token_id("eot_token_id", n), keys.token_id("eom_token_id", n), *map(control.get, _ENDS)]
    add_bos = keys.optional("add_bos_token", bool)
    bos_first = bos is not None and (default_bos if add_bos is None else add_bos)
    eos_last = eos is not None and bool(keys.optional("add_eos_token", bool))
    return Vocabulary(
        backend=backend,
        byte_level=spelled is byte_level_bytes,
        token_bytes=tuple(_bytes_of(token, kind, spelled) for token, kind in zip(tokens, kinds, strict=True)),
        special_ids=frozenset(i for i, kind in enumerate(kinds) if kind in {_UNKNOWN, _CONTROL}),
        control=control | {token: tokens.index(token) for token in _markers(tokens, kinds)},
        prefix=(bos,) if bos_first and bos is not None else (),
        suffix=(eos,) if eos_last and eos is not None else (),
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        strip_leading_space=spelled is sentencepiece_bytes and keys.optional("add_space_prefix", bool) is not False,
        texts={name: tokens[number] for name, number in named.items() if number is not None},
        chat_template=keys.template("tokenizer.chat_template"),
        tool_template=keys.template("tokenizer.chat_template.tool_use"),
    )


def _bytes_of(token: str, kind: int, spelled: Callable[[str], bytes]) -> bytes:
    if kind == _UNUSED:
        return b""
    return spelled(token) if kind in {_NORMAL, _BYTE} else token.encode()


def _markers(tokens: list[str], kinds: list[int]) -> list[str]:
    return [
        token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED and looks_like_marker(token)
    ]


def _added(tokens: list[str], kinds: list[int]) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
    ]


def _split(keys: _Keys) -> _Split:
    remedy = f"supported: {', '.join(_SPLITS)}. Serve the model's Hugging Face directory instead"
    name = keys.optional("pre", str)
    if name is None:
        raise keys.error("pre", f"is missing, and how to split words cannot be guessed; {remedy}")
    if name not in _SPLITS:
        raise keys.error("pre", f"is {name!r}; {remedy}")
    return _SPLITS[name]


def _byte_level(keys: _Keys, tokens: list[str], split: _Split) -> Backend:
    merges = [tuple(merge.split(" ")) for merge in cast("list[str]", keys.required("merges", list))]
    ids = {token: i for i, token in enumerate(tokens)}
    if wrong := next(
        (merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= ids.keys()), None
    ):
        raise keys.error("merges", f"holds {' '.join(wrong)!r}, which is not made of two tokens of the vocabulary")
    model = models.BPE(vocab=ids, merges=cast("list[tuple[str, str]]", merges), ignore_merges=split.whole_words)
    backend = Backend(model)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(keys: _Keys, tokens: list[str], kinds: list[int]) -> Backend:
    scores = cast("list[float]", keys.required("scores", list))
    if len(scores) != len(tokens):
        raise keys.error("scores", f"has {len(scores)} entries for {len(tokens)} tokens")
    unknown = keys.token_id("unknown_token_id", len(tokens))
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=_merges(tokens, kinds, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", METASPACE)]
    if keys.optional("add_space_prefix", bool) is not False:
        spaces.insert(0, normalizers.Prepend(METASPACE))
    backend.normalizer = normalizers.Sequence(spaces)
    return backend


def _merges(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the pairs that join into a token, best score first: SentencePiece joins what scores best as a whole."""
    parts = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    order = sorted((i for i, kind in enumerate(kinds) if kind == _NORMAL), key=lambda i: -scores[i])
    return [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in order)
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
