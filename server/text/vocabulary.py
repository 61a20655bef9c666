"""What a tokenizer is once its files are read, whatever format they had; and how tokens are spelled as bytes.

Must not know: files, templates, requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

METASPACE = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKER = re.compile(r"<[|\uff5c][^\s<>]+[|\uff5c]>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A loaded tokenizer. `backend` finds control tokens in any text; who must not have that, builds on its model."""

    backend: Backend
    byte_level: bool  # normal tokens are spelled in GPT-2's byte alphabet
    token_bytes: tuple[bytes, ...]  # by id, vocab_size long; empty for ids that have no text (padding)
    special_ids: frozenset[int]  # left out of text when special tokens are skipped
    control: Mapping[str, int]  # text -> id of the tokens that a user's text must never become
    prefix: tuple[int, ...]  # ids that `add_special` puts before a prompt
    suffix: tuple[int, ...]  # and after it
    bos_id: int | None
    eos_ids: tuple[int, ...]  # any of them ends a generation; the first is the tokenizer's own
    strip_leading_space: bool  # a text from the start of a sequence loses one leading space
    texts: Mapping[str, str]  # bos_token, eos_token, unk_token, pad_token, as chat templates name them
    chat_template: str | None
    tool_template: str | None  # used instead when tools are given


def _byte_alphabet() -> dict[int, int]:
    """Return code point -> byte of GPT-2's alphabet: printable Latin-1 stands for itself, the rest counts from 256."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    return {byte: byte for byte in itself} | {256 + i: byte for i, byte in enumerate(others)}


BYTE_OF_CODE_POINT: Mapping[int, int] = _byte_alphabet()
CODE_POINT_OF_BYTE: Mapping[int, int] = {byte: code for code, byte in BYTE_OF_CODE_POINT.items()}


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes that a token of a byte-level vocabulary stands for; text outside the alphabet is itself."""
    try:
        return token.translate(BYTE_OF_CODE_POINT).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Return the bytes that a token of a SentencePiece vocabulary stands for: `<0x0A>` is a byte, `▁` a space."""
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(METASPACE, " ").encode()


def add_tokens(backend: Backend, tokens: Sequence[AddedToken]) -> None:
    """Add tokens; those that the model has already keep their id, others follow its ids in the order given."""
    cast("Any", backend).add_tokens(list(tokens))  # the library's own types are incomplete here


def looks_like_marker(token: str) -> bool:
    """Whether an added token is spelled `<|…|>`: such a token is control, also where its file does not say so."""
    return _MARKER.fullmatch(token) is not None
