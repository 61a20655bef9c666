"""Field types of requests: JSON values of several spellings become one Python value each, here and nowhere else.

Each raises UnfitValue with value, limit and remedy; the field's name is put before it by problems.py.
Must not know: which request has which field.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, WithJsonSchema

Prompts = tuple[str | tuple[int, ...], ...]

_CANONICAL_ID = re.compile(r"0|[1-9][0-9]{0,18}")
_MAX_ID = 2**31 - 1
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}


class UnfitValue(ValueError):
    """A value that cannot be used; pydantic takes it for one of its own kind."""


def shown(value: object) -> str:
    """Return a value as it may stand in a message: as JSON has it, short, whatever it is."""
    if isinstance(value, str):
        value = value[:60]
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_ids(value: object) -> bool:
    """Whether `value` is a list of integers that can be token ids."""
    if not isinstance(value, list):
        return False
    items = cast("list[object]", value)
    return all(type(item) is int and 0 <= item <= _MAX_ID for item in items)


def _ids(value: object) -> tuple[int, ...]:
    if not is_ids(value):
        raise UnfitValue(f"is {shown(value)}; it must be a list of token ids, integers from 0")
    return tuple(cast("list[int]", value))


def _stops(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if not all(isinstance(item, str) for item in items):
        raise UnfitValue(f"is {shown(cast('object', value))}; it must be a string or a list of strings")
    if "" in items:
        raise UnfitValue("holds an empty string, which would stop before the first token; leave it out")
    return tuple(cast("list[str]", items))


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise UnfitValue(f"is {shown(value)}; it must be an object from token id to bias")
    out: list[tuple[int, float]] = []
    for key, bias in cast("dict[str, Any]", value).items():
        if not _CANONICAL_ID.fullmatch(key):
            raise UnfitValue(f"has the key {shown(key)}; keys must be token ids, integers from 0")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise UnfitValue(f"of token {key} is {shown(bias)}; it must be a number from -100 to 100")
        out.append((int(key), float(bias)))
    return tuple(out)


def _prompts(value: object) -> Prompts:
    """One prompt or several, each a text or token ids -> always several."""
    if isinstance(value, str):
        return (value,)
    if value and is_ids(value):
        return (_ids(value),)
    items = cast("list[object]", value) if isinstance(value, list) else []
    if items and all(isinstance(item, str) for item in items):
        return tuple(cast("list[str]", items))
    if items and all(is_ids(item) for item in items):
        return tuple(_ids(item) for item in items)
    raise UnfitValue(
        f"is {shown(cast('object', value))}; it must be a string, a list of strings, a list of token ids, or a list of "
        "such lists, and not be empty"
    )


def _content(value: object) -> str | None:
    """A text, null, or a list of text parts (joined by newlines, as vLLM and the models' templates have it)."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UnfitValue(f"is {shown(value)}; it must be a string, null or a list of text parts")
    texts: list[str] = []
    for i, item in enumerate(cast("list[object]", value)):
        part = cast("dict[str, object]", item) if isinstance(item, dict) else {}
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise UnfitValue(f"has part {i} of type {shown(kind)}; only parts of type 'text' are supported")
        if not isinstance(text, str):
            raise UnfitValue(f"has part {i} with text {shown(text)}; it must be a string")
        texts.append(text)
    return "\n".join(texts)


def _schema(first: dict[str, Any], *others: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [first, *others]} if others else first)


TokenIds = Annotated[tuple[int, ...], BeforeValidator(_ids), _schema(_IDS_SCHEMA)]
Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_stops),
    _schema({"type": "string"}, {"type": "array", "items": {"type": "string"}}),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_logit_bias),
    _schema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
Prompt = Annotated[
    Prompts,
    BeforeValidator(_prompts),
    _schema(
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA},
    ),
]
Content = Annotated[str | None, BeforeValidator(_content), _schema({"type": "string"}, {"type": "null"}, _TEXT_PARTS)]
Accepted = Annotated[Any, Field(default=None, description="Accepted; changes nothing about the answer.")]
