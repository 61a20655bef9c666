"""Reads the tokenizer of a Hugging Face model directory: tokenizer.json and the small files beside it.

Must not know: weights, prompts. Never runs code from the directory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from tokenizers import Tokenizer as Backend

from server.errors import ModelError
from server.text.vocabulary import METASPACE, Vocabulary, byte_level_bytes, looks_like_marker, sentencepiece_bytes

_CONVERT_WITHIN_S = 300
_TEXT_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class _Component(msgspec.Struct):
    """One step of a pipeline in tokenizer.json, with the fields of those steps that matter here."""

    type: str
    decoders: list[_Component] = []
    content: str = ""
    start: int = 0
    prepend_scheme: str = "always"
    pattern: dict[str, str] = {}


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that the library does not tell."""

    decoder: _Component | None = None


def load_hf_vocabulary(directory: Path) -> Vocabulary:
    """Return the tokenizer of a model directory. Raises ModelError, naming the file, for what cannot be used."""
    raw = _tokenizer_json(directory)
    try:
        steps = _decoder_steps(msgspec.json.decode(raw, type=_TokenizerFile).decoder)
        backend = Backend.from_buffer(raw)
    except Exception as error:  # the library raises bare Exception for whatever it does not like
        raise ModelError(f"{directory / 'tokenizer.json'}: cannot be used: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read(directory, "tokenizer_config.json")
    return _vocabulary(directory, backend, steps, config)


def _vocabulary(directory: Path, backend: Backend, steps: list[_Component], config: Mapping[str, Any]) -> Vocabulary:
    added = backend.get_added_tokens_decoder()
    texts = {name: text for name in _TEXT_NAMES if (text := _text(config.get(name))) is not None}
    eos = _id(backend, texts.get("eos_token"))
    bos = _id(backend, texts.get("bos_token"))
    size = max(_model_vocab_size(directory), backend.get_vocab_size(with_added_tokens=True), max(added, default=0) + 1)
    byte_level = any(step.type == "ByteLevel" for step in steps)
    prefix, suffix = _around(backend, config, bos, eos)
    chat, tools = _templates(directory, config)
    marked = {token.content: i for i, token in added.items() if token.special or looks_like_marker(token.content)}
    return Vocabulary(
        backend=backend,
        byte_level=byte_level,
        token_bytes=_token_bytes(backend, size, byte_level=byte_level),
        special_ids=frozenset(i for i, token in added.items() if token.special),
        control=marked,
        prefix=prefix,
        suffix=suffix,
        bos_id=bos,
        eos_ids=_eos_ids(directory, eos, size),
        strip_leading_space=any(_strips(step) for step in steps),
        texts=texts,
        chat_template=chat,
        tool_template=tools,
    )


def _tokenizer_json(directory: Path) -> bytes:
    """Return tokenizer.json; a directory without one is converted by transformers in a process of its own, once."""
    path = directory / "tokenizer.json"
    try:
        if path.exists():
            return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    command = [sys.executable, "-m", "server.text.convert_tokenizer", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_CONVERT_WITHIN_S)
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"{directory}: has no tokenizer.json, and converting took over {_CONVERT_WITHIN_S} s"
        ) from None
    if done.returncode != 0:
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(f"{directory}: has no tokenizer.json, and its tokenizer cannot be converted: {reason}")
    return done.stdout


def _decoder_steps(decoder: _Component | None) -> list[_Component]:
    if decoder is None:
        raise ValueError("it has no decoder; supported: ByteLevel, or SentencePiece's Metaspace and ByteFallback")
    steps = decoder.decoders if decoder.type == "Sequence" else [decoder]
    kinds = {step.type for step in steps}
    if unknown := kinds - {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}:
        raise ValueError(f"its decoder has a step {min(unknown)!r}; supported: ByteLevel, Metaspace, ByteFallback")
    for step in steps:
        if step.type == "Replace" and (step.pattern.get("String"), step.content) != (METASPACE, " "):
            raise ValueError(
                f"its decoder replaces {step.pattern} by {step.content!r}; supported: '{METASPACE}' by ' '"
            )
    return steps


def _strips(step: _Component) -> bool:
    """Whether a step takes a space away from the start of a text."""
    return (step.type == "Strip" and step.content == " " and step.start > 0) or (
        step.type == "Metaspace" and step.prepend_scheme != "never"
    )


def _token_bytes(backend: Backend, size: int, *, byte_level: bool) -> tuple[bytes, ...]:
    spelled = byte_level_bytes if byte_level else sentencepiece_bytes
    table = [b""] * size
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        table[number] = spelled(token)
    for number, token in backend.get_added_tokens_decoder().items():
        table[number] = token.content.encode()
    return tuple(table)


def _around(
    backend: Backend, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids before and after a prompt: tokenizer_config.json decides if it says, else the post-processor."""
    if "add_bos_token" in config or "add_eos_token" in config:
        first = (bos,) if config.get("add_bos_token") and bos is not None else ()
        last = (eos,) if config.get("add_eos_token") and eos is not None else ()
        return first, last
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return tuple(whole[:start]), tuple(whole[start + len(plain) :])


def _eos_ids(directory: Path, eos: int | None, size: int) -> tuple[int, ...]:
    named = _read(directory, "generation_config.json").get("eos_token_id")
    if named is None:
        named = _read(directory, "config.json").get("eos_token_id")
    found = [eos, *cast("list[object]", named)] if isinstance(named, list) else [eos, named]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < size))


def _templates(directory: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the chat template and, where there is a separate one, that for requests with tools."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        tools = directory / "additional_chat_templates" / "tool_use.jinja"
        return file.read_text(encoding="utf-8"), tools.read_text(encoding="utf-8") if tools.is_file() else None
    held = config.get("chat_template") or _read(directory, "chat_template.json").get("chat_template")
    if isinstance(held, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in cast("list[dict[str, object]]", held)}
        return named.get("default"), named.get("tool_use")
    return (held if isinstance(held, str) else None), None


def _model_vocab_size(directory: Path) -> int:
    size = _read(directory, "config.json").get("vocab_size")
    return size if isinstance(size, int) else 0


def _read(directory: Path, name: str) -> dict[str, Any]:
    """Return a JSON object from the directory, empty if there is no such file. Raises ModelError."""
    path = directory / name
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return cast("dict[str, Any]", value)


def _text(value: object) -> str | None:
    """Return the text of a special token, which is stored as a string or as an object with its flags."""
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).get("content")
    return value if isinstance(value, str) else None


def _id(backend: Backend, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)
