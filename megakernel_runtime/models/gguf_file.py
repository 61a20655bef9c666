"""The GGUF container: header, metadata and tensor table of a file, every bound checked before it is trusted.

Knows bytes only (github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little endian). Must not know: what a key
or a tensor means, torch. A hostile file gives GgufError, in time and memory bounded by its size.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megakernel_runtime.interface import ModelError

_MAX_ENTRIES = 1 << 17  # metadata pairs, tensors; the largest published files have some thousands
_MAX_NAME_BYTES = 1 << 16
_MAX_DIMENSIONS = 4
_MAX_VECTOR_BYTES = 1 << 16
_STRING, _ARRAY = 8, 9
# Value type -> struct code: u8, i8, u16, i16, u32, i32, f32, bool; u64, i64, f64.
_SCALARS = {kind: "<" + code for kind, code in [*enumerate("BbHhIif?"), (10, "Q"), (11, "q"), (12, "d")]}


class GgufError(ModelError):
    """A file that is no GGUF file, or a damaged one; the message names file and place."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How ggml stores a run of elements of one row."""

    name: str
    elements: int  # per block
    n_bytes: int  # per block


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in our order: rows first, the contiguous dimension last."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of metadata, skipped and not decoded: none of ours is needed."""

    count: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file. `data` is a private mapping of all its bytes: writing to it would not reach the file."""

    path: Path
    metadata: Mapping[str, object]  # int, float, bool, str or GgufArray
    tensors: Mapping[str, GgufTensor]
    data: mmap.mmap

    def floats(self, name: str) -> tuple[float, ...] | None:
        """Return the values of a small F32 vector, None if there is none of that name; GgufError if it is none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or tensor.n_bytes > _MAX_VECTOR_BYTES:
            held = f"is {tensor.type.name} {tensor.shape}"
            raise GgufError(f"{self.path}: tensor '{name}' {held}; supported: F32, at most {_MAX_VECTOR_BYTES} bytes")
        return struct.unpack_from(f"<{tensor.n_bytes // 4}f", self.data, tensor.offset)


def is_gguf(path: Path) -> bool:
    """Whether `path` is to be read as a GGUF file: any file is, a directory is Hugging Face's."""
    return path.is_file()


def open_gguf(path: Path) -> GgufFile:
    """Return the opened file, its tensor table checked against its size. Raises GgufError."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise GgufError(f"{path}: cannot be read: {error}") from error
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        raise GgufError(f"{path}: not a GGUF file: it starts with {data[:4]!r}")
    cursor.position = 4
    if (version := cursor.unsigned("<I")) not in {2, 3}:
        cursor.fail(f"GGUF version {version} (or big endian); supported: versions 2 and 3, little endian")
    n_tensors, n_pairs = cursor.count("tensors"), cursor.count("metadata pairs")
    metadata = _metadata(cursor, n_pairs)
    return GgufFile(path, metadata, _tensors(cursor, n_tensors, metadata), data)


class _Cursor:
    """A read position that never leaves the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position, self.size = path, data, 0, len(data)

    def fail(self, what: str) -> NoReturn:
        raise GgufError(f"{self.path}: at byte {self.position}: {what}")

    def skip(self, n_bytes: int) -> int:
        """Move past n_bytes, which must be there; return where they began."""
        start = self.position
        if n_bytes > self.size - start:
            self.fail(f"{n_bytes} bytes expected, {self.size - start} left: the file is truncated or damaged")
        self.position = start + n_bytes
        return start

    def scalar(self, code: str) -> int | float | bool:
        return struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))[0]

    def unsigned(self, code: str) -> int:
        return int(self.scalar(code))

    def count(self, what: str) -> int:
        if (count := self.unsigned("<Q")) > _MAX_ENTRIES:
            self.fail(f"{count} {what}; the limit is {_MAX_ENTRIES}")
        return count

    def string(self, max_bytes: int | None = None) -> str:
        n_bytes = self.unsigned("<Q")
        if max_bytes is not None and n_bytes > max_bytes:
            self.fail(f"a name of {n_bytes} bytes; the limit is {max_bytes}")
        start = self.skip(n_bytes)
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"text that is not UTF-8: {error.reason}")

    def array(self) -> GgufArray:
        kind, count = self.unsigned("<I"), self.unsigned("<Q")
        if kind == _STRING:
            self.skip_strings(count)
        elif kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]))
        else:
            self.fail(f"an array of values of type {kind}; supported: scalars and strings")
        return GgufArray(count)

    def skip_strings(self, count: int) -> None:
        unpack, position, end = struct.Struct("<Q").unpack_from, self.position, self.size - 8
        for _ in range(count):  # local names: vocabularies have 100,000 entries
            if position > end:
                break
            position += 8 + unpack(self.data, position)[0]
        else:
            self.skip(position - self.position)
            return
        self.fail(f"an array of {count} strings ends beyond the file: it is truncated or damaged")


def _metadata(cursor: _Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(count):
        key, kind = cursor.string(_MAX_NAME_BYTES), cursor.unsigned("<I")
        if key in metadata:
            cursor.fail(f"metadata key '{key}' occurs twice")
        if kind == _STRING:
            metadata[key] = cursor.string()
        elif kind == _ARRAY:
            metadata[key] = cursor.array()
        elif kind in _SCALARS:
            metadata[key] = cursor.scalar(_SCALARS[kind])
        else:
            cursor.fail(f"metadata key '{key}' has type {kind}, which GGUF does not know")
    return metadata


def _tensors(cursor: _Cursor, count: int, metadata: Mapping[str, object]) -> dict[str, GgufTensor]:
    """Return the table; offsets must follow each other without gaps, as ggml itself demands."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        cursor.fail(f"general.alignment is {alignment!r}; supported: a power of two from 8 to {1 << 20}")
    entries: list[tuple[str, BlockType, tuple[int, ...], int]] = []
    offset = 0
    for _ in range(count):
        name, kind, shape = _tensor_head(cursor)
        if (held := cursor.unsigned("<Q")) != offset:
            cursor.fail(f"tensor '{name}' lies at data offset {held}, expected {offset}")
        n_bytes = _size_bytes(shape, kind)
        entries.append((name, kind, shape, offset))
        offset = _padded(offset + n_bytes, alignment)
    start = _padded(cursor.position, alignment)
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, relative in entries:
        if name in tensors:
            cursor.fail(f"tensor '{name}' occurs twice")
        tensor = GgufTensor(name, kind, shape, start + relative, _size_bytes(shape, kind))
        if tensor.offset + tensor.n_bytes > cursor.size:
            ends = tensor.offset + tensor.n_bytes
            cursor.fail(f"tensor '{name}' ends at byte {ends}, the file at {cursor.size}: it is truncated or damaged")
        tensors[name] = tensor
    return tensors


def _tensor_head(cursor: _Cursor) -> tuple[str, BlockType, tuple[int, ...]]:
    name, n_dimensions = cursor.string(_MAX_NAME_BYTES), cursor.unsigned("<I")
    if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
        cursor.fail(f"tensor '{name}' has {n_dimensions} dimensions; supported: 1 to {_MAX_DIMENSIONS}")
    shape = tuple(reversed([cursor.unsigned("<Q") for _ in range(n_dimensions)]))
    number = cursor.unsigned("<I")
    kind = BLOCK_TYPES.get(number)
    if kind is None:
        supported = ", ".join(block.name for block in BLOCK_TYPES.values())
        cursor.fail(f"tensor '{name}' has ggml type {number}; supported: {supported}")
    if min(shape) < 1 or shape[-1] % kind.elements:
        cursor.fail(f"tensor '{name}' of type {kind.name} has shape {shape}; rows are multiples of {kind.elements}")
    return name, kind, shape


def _size_bytes(shape: tuple[int, ...], kind: BlockType) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements // kind.elements * kind.n_bytes


def _padded(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
