"""The metadata of a GGUF file with its arrays decoded: where a tokenizer and a chat template are stored.

Knows the container's bytes (github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little endian). Must not know:
what a key means; tensors. Every length is checked against the file before memory is taken for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from pathlib import Path

from server.errors import ModelError

_MAX_PAIRS = 1 << 17
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")

Value = str | int | float | bool | list[str] | list[int] | list[float]


def read_metadata(path: Path, prefixes: Collection[str]) -> dict[str, Value]:
    """Return the pairs whose key starts with one of `prefixes`; all others are skipped. Raises ModelError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).pairs(tuple(prefixes))
    except (OSError, ValueError) as error:  # ValueError: empty file, bad UTF-8, or what _Reader found
        raise ModelError(f"{path}: its GGUF metadata cannot be read: {error}") from error


class _Reader:
    """A position in the file. Raises ValueError, saying where, for anything that is not as it should be."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def pairs(self, prefixes: tuple[str, ...]) -> dict[str, Value]:
        if self._take(4) != b"GGUF":
            raise ValueError("it is not a GGUF file")
        if (version := self._number(_KIND)) not in {2, 3}:
            raise ValueError(f"GGUF version {version} is not supported; versions 2 and 3 are")
        self._number(_LENGTH)  # tensors
        if (count := self._number(_LENGTH)) > _MAX_PAIRS:
            raise ValueError(f"{count} metadata pairs; the limit is {_MAX_PAIRS}")
        found: dict[str, Value] = {}
        for _ in range(count):
            key = self._string()
            value = self._value(self._number(_KIND), wanted=key.startswith(prefixes))
            if value is not None:
                found[key] = value
        return found

    def _value(self, kind: int, *, wanted: bool) -> Value | None:
        if kind == _STRING:
            raw = self._take(self._number(_LENGTH))
            return raw.decode() if wanted else None
        if kind == _ARRAY:
            return self._array(self._number(_KIND), self._number(_LENGTH), wanted=wanted)
        value = self._scalars(kind, 1)[0]
        return value if wanted else None

    def _array(self, kind: int, count: int, *, wanted: bool) -> Value | None:
        if kind != _STRING:
            values = self._scalars(kind, count)
            return values if wanted else None
        strings = self._strings(count)
        return [raw.decode() for raw in strings] if wanted else None

    def _scalars(self, kind: int, count: int) -> list[int] | list[float]:
        if (code := _SCALARS.get(kind)) is None:
            raise ValueError(f"value type {kind} at byte {self._at} is not supported")
        raw = self._take(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", raw))

    def _strings(self, count: int) -> list[bytes]:
        data, at, unpack = self._data, self._at, _LENGTH.unpack_from  # local names: vocabularies are long
        end = len(data)
        strings: list[bytes] = []
        for _ in range(count):
            stop = at + 8 + unpack(data, at)[0] if at + 8 <= end else end + 1
            if stop > end:
                raise ValueError(f"an array of {count} strings ends beyond the file: it is truncated")
            strings.append(data[at + 8 : stop])
            at = stop
        self._at = at
        return strings

    def _string(self) -> str:
        return self._take(self._number(_LENGTH)).decode()

    def _number(self, form: struct.Struct) -> int:
        return int(form.unpack(self._take(form.size))[0])

    def _take(self, n_bytes: int) -> bytes:
        stop = self._at + n_bytes
        if stop > len(self._data):
            raise ValueError(f"{n_bytes} bytes expected at byte {self._at}, the file ends before: it is truncated")
        raw = self._data[self._at : stop]
        self._at = stop
        return raw
