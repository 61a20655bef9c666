"""Bytes of a request -> a JSON object of bounded depth, in which everything can be said again in UTF-8.

Strict where leniency would let something pass unseen: repeated keys, NaN and Infinity, numbers beyond a double, lone
surrogates. Must not know: which fields there are.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, cast

from server.errors import InvalidRequest

# Strings are skipped whole, also an unterminated one; possessive, so that time is linear in the body.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes, *, max_depth: int) -> dict[str, Any]:
    """Return the object. Raises InvalidRequest (code "invalid_json") saying what is wrong and where."""
    _check_depth(raw, max_depth)
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer
        )
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _invalid("the body is JSON but no object; send {...}")
    body = cast("dict[str, Any]", value)
    if _SURROGATE.search(raw):
        _check_surrogates(body)
    return body


def _check_depth(raw: bytes, max_depth: int) -> None:
    if raw.count(b"[") + raw.count(b"{") <= max_depth:
        return
    depth = 0
    for match in _TOKEN.finditer(raw):
        first = raw[match.start()]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                raise _invalid(f"the body is nested more than {max_depth} levels deep; flatten it")
        elif first in b"]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _invalid(f"key {twice[:100]!r} is given twice in one object; give it once")
    return out


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid(f"the body holds {name}, which is not JSON; numbers must be finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _invalid(f"number {text[:40]} is too large; numbers must be finite doubles")
    return value


def _integer(text: str) -> int:
    if len(text) > 40:
        raise _invalid(f"number {text[:40]}... has {len(text)} digits; numbers may have up to 40")
    return int(text)


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        lone = ord(error.object[error.start])
        raise _invalid(f"a string holds \\u{lone:04x}, half of a surrogate pair, which is no character") from None


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_json")
