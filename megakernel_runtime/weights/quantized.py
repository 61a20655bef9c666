"""ggml's quantised matrices as torch tensors: the raw blocks, what they stand for, and their values.

Every block type is affine over groups of 16 or 32 neighbours in a row: value = scale * code (+ offset). The layouts
are those of ggml-common.h and ggml-quants.c (github.com/ggml-org/ggml). Must not know: files, models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Dequantised at a time: intermediates stay in the cache, and below torch's grain of 32768 elements no operation pays
# for waking threads, which costs more than it gains here and a hundredfold on a busy machine.
_CHUNK_ELEMENTS = 32767


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix taken apart: its element (r, c) is scale[r, g] * codes[r, c] + offset[r, g] with g = c // group_size."""

    codes: Tensor  # (rows, columns) int8
    scale: Tensor  # (rows, columns / group_size) f32
    offset: Tensor | None  # as scale; None: all zero
    group_size: int

    def values(self) -> Tensor:
        """Return the matrix, (rows, columns) f32."""
        groups = self.codes.view(*self.scale.shape, self.group_size).float() * self.scale.unsqueeze(-1)
        if self.offset is not None:
            groups += self.offset.unsqueeze(-1)
        return groups.view_as(self.codes)


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix as ggml stores it. `blocks` may be a view of the mapped file; nothing here writes to it."""

    kind: str  # a key of LAYOUTS: "Q4_1", ...
    blocks: Tensor  # (rows, blocks a row, bytes a block) uint8

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        rows, blocks, _ = self.blocks.shape
        return rows, blocks * LAYOUTS[self.kind].block_elements

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks.nbytes

    def unpack(self) -> Affine:
        """Return codes, scales and offsets, which together hold the matrix exactly."""
        rows, columns = self.shape
        layout = LAYOUTS[self.kind]
        codes, scale, offset = layout.unpack(self.blocks.reshape(-1, self.blocks.shape[-1]))
        return Affine(
            codes.reshape(rows, columns),
            scale.reshape(rows, -1),
            None if offset is None else offset.reshape(rows, -1),
            layout.group_size,
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, (rows, columns): computed in f32, bit for bit as ggml does, then rounded to `dtype`."""
        rows, columns = self.shape
        out = torch.empty(rows, columns, dtype=dtype)
        step = max(1, _CHUNK_ELEMENTS // columns)
        for start in range(0, rows, step):
            part = QuantizedTensor(self.kind, self.blocks[start : start + step])
            out[start : start + step] = part.unpack().values()
        return out


# Codes (blocks, elements) int8, scale and offset (blocks, groups) f32, of blocks (blocks, bytes) uint8.
_Unpacked = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Layout:
    """A block type: elements a block, elements a group, and how to take blocks apart."""

    block_elements: int
    group_size: int
    unpack: Callable[[Tensor], _Unpacked]


def _f16(blocks: Tensor, start: int) -> Tensor:
    """Return the half-precision number at byte `start` of each block, (blocks, 1) f32."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low halves of all bytes of a block, then the high halves: (blocks, 2 * bytes) uint8."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return bit i of each block's 4 bytes as 0 or 16, (blocks, 32) uint8."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return (bits.reshape(len(packed), 32) & 1) << 4


def _q8_0(b: Tensor) -> _Unpacked:
    return b[:, 2:].view(torch.int8), _f16(b, 0), None


def _q4_0(b: Tensor) -> _Unpacked:
    return _nibbles(b[:, 2:]).view(torch.int8) - 8, _f16(b, 0), None


def _q4_1(b: Tensor) -> _Unpacked:
    return _nibbles(b[:, 4:]).view(torch.int8), _f16(b, 0), _f16(b, 2)


def _q5_0(b: Tensor) -> _Unpacked:
    return (_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).view(torch.int8) - 16, _f16(b, 0), None


def _q5_1(b: Tensor) -> _Unpacked:
    return (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).view(torch.int8), _f16(b, 0), _f16(b, 2)


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset of the 8 groups of Q4_K and Q5_K: 6 bit factors, packed in bytes 4..16, of two f16."""
    low, high, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), dim=1)
    minimum = torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), dim=1)
    return _f16(b, 0) * scale.float(), -(_f16(b, 2) * minimum.float())


def _k_nibbles(packed: Tensor) -> Tensor:
    """Return 256 codes a block of 128 bytes: each run of 32 bytes holds two groups, low halves first."""
    runs = packed.reshape(-1, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), dim=2).reshape(-1, 256)


def _q4_k(b: Tensor) -> _Unpacked:
    return _k_nibbles(b[:, 16:]).view(torch.int8), *_k_scales(b)


def _q5_k(b: Tensor) -> _Unpacked:
    """Bit g of byte i of the 32 high bytes is the fifth bit of element i of group g."""
    fifth = (b[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1) << 4
    return (_k_nibbles(b[:, 48:]) | fifth.reshape(-1, 256)).view(torch.int8), *_k_scales(b)


def _q6_k(b: Tensor) -> _Unpacked:
    """Two halves of 128 elements; in each, 64 bytes of low nibbles and 32 bytes of four 2 bit high parts."""
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).reshape(-1, 2, 4, 32)
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = (low | (high & 3) << 4).reshape(-1, 256).view(torch.int8) - 32
    return codes, _f16(b, 208) * b[:, 192:208].view(torch.int8).float(), None


LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout(32, 32, _q4_0),
    "Q4_1": Layout(32, 32, _q4_1),
    "Q5_0": Layout(32, 32, _q5_0),
    "Q5_1": Layout(32, 32, _q5_1),
    "Q8_0": Layout(32, 32, _q8_0),
    "Q4_K": Layout(256, 32, _q4_k),
    "Q5_K": Layout(256, 32, _q5_k),
    "Q6_K": Layout(256, 16, _q6_k),
}
