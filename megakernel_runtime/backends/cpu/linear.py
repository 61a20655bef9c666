"""Matrices of a model in the formats that the CPU multiplies fast, all behind one callable.

| format | weights             | inputs | torch's kernel                            | best where                    |
| ------ | ------------------- | ------ | ----------------------------------------- | ----------------------------- |
| fp32   | f32                 | f32    | MKL or OpenBLAS                           | no FBGEMM; proofs             |
| fp16   | f16                 | f32    | FBGEMM: converts to f32 in registers      | default: f32 inputs and sums  |
| bf16   | bf16, packed        | bf16   | oneDNN, AMX where there is one            | long prompts, large batches   |
| int8   | int8, scale a row   | bf16   | weight-only int8                          | little memory                 |
| int4   | 4 bit, groups of 32 | bf16   | weight-only int4, with GGUF's own codes   | batch 1, 4 bit files          |

Must not know: what a matrix is for, steps, slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megakernel_runtime.weights.quantized import Affine, QuantizedTensor

Matrix = Tensor | QuantizedTensor
FORMATS = ("fp32", "fp16", "bf16", "int8", "int4")
_GROUP = 32  # of int4, the block length of GGUF's 4 bit types


class Linear(Protocol):
    """x (T, K) -> x @ W^T + bias (T, N), both of `dtype`. `nbytes` is what one call reads of the weights."""

    dtype: torch.dtype
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        ...


def default_format() -> str:
    """Return the format of "auto": f16 weights under f32 sums where this processor has the kernel, else f32."""
    return "fp16" if _has_f16_kernel() else "fp32"


def _has_f16_kernel() -> bool:
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def make_linear(parts: Sequence[Matrix], bias: Tensor | None, weight_format: str) -> Linear:
    """Return one matrix of `parts`, (N_i, K) each, stacked along N. `bias` is (N,).

    In int4, matrices that the file holds in 4 bits keep their codes, dense ones are rounded to 4 bits, and all others
    (finer quantised ones; sizes that the kernel has no code for) take `default_format`, as do sizes of int8.
    """
    n_rows, n_columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    fits = n_rows % 16 == 0 and n_columns % _GROUP == 0
    if weight_format == "int4" and fits:
        four_bit = [_four_bit(part) for part in parts]
        if all(part is not None for part in four_bit):
            return Int4Linear([part for part in four_bit if part is not None], bias)
    if weight_format == "int8" and fits:
        return Int8Linear(_dense(parts), bias)
    if weight_format == "bf16":
        return Bf16Linear(_dense(parts), bias)
    return Fp16Linear(_dense(parts), bias) if _falls_to_fp16(weight_format) else Fp32Linear(_dense(parts), bias)


def _falls_to_fp16(weight_format: str) -> bool:
    return weight_format == "fp16" or (weight_format != "fp32" and default_format() == "fp16")


class Fp32Linear:
    """Plain f32."""

    dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.float()
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        return functional.linear(x, self._weight, self._bias)


class Fp16Linear:
    """f16 weights, f32 inputs, sums and results. Weights from bf16 files are exact down to 2**-24."""

    dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = _operator("quantized", "linear_prepack_fp16")(weight, None if bias is None else bias.float())
        self._multiply = _operator("quantized", "linear_dynamic_fp16")
        self.nbytes = weight.numel() * 2

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        return self._multiply(x, self._packed)


class Bf16Linear:
    """bf16 weights in oneDNN's own layout."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = _operator("mkldnn", "_reorder_linear_weight")(weight.bfloat16(), 1)
        self._bias = None if bias is None else bias.bfloat16()
        self._multiply = _operator("mkldnn", "_linear_pointwise")
        self.nbytes = weight.numel() * 2

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        return self._multiply(x, self._packed, self._bias, "none", [], "")


class Int8Linear:
    """int8 weights, symmetric, with a scale for each row."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        self._weight = (weight / scale).round().to(torch.int8)
        self._scale = scale.squeeze(1).bfloat16()
        self._bias = None if bias is None else bias.bfloat16()
        self._multiply = _operator("aten", "_weight_int8pack_mm")
        self.nbytes = self._weight.nbytes + self._scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        y = self._multiply(x, self._weight, self._scale)
        return y if self._bias is None else y + self._bias


class Int4Linear:
    """4 bit weights, affine in groups of 32."""

    dtype = torch.bfloat16

    def __init__(self, parts: Sequence[Affine], bias: Tensor | None) -> None:
        codes = torch.cat([part.codes for part in parts])
        scale = torch.cat([part.scale for part in parts])
        offset = torch.cat([torch.zeros_like(part.scale) if part.offset is None else part.offset for part in parts])
        # The kernel's codes are 0..15 and stand for (code - 8) * scale + zero.
        shift = torch.cat([part.codes.new_full((len(part.codes), 1), _shift(part)) for part in parts])
        zero = offset + (8.0 - shift) * scale
        pack = _operator("aten", "_convert_weight_to_int4pack_for_cpu")
        self._packed = pack((codes + shift).int(), 1)
        pairs = torch.stack((scale, zero), dim=-1).bfloat16()  # (N, K / 32, 2)
        self._scale_zero = pairs.transpose(0, 1).contiguous()
        self._bias = None if bias is None else bias.bfloat16()
        self._multiply = _operator("aten", "_weight_int4pack_mm_for_cpu")
        self.nbytes = self._packed.nbytes + self._scale_zero.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        y = self._multiply(x, self._packed, _GROUP, self._scale_zero)
        return y if self._bias is None else y + self._bias


def _operator(namespace: str, name: str) -> Callable[..., Tensor]:
    """Return the function behind torch.ops.<namespace>.<name>, past the search for an overload on each call."""
    return getattr(getattr(torch.ops, namespace), name).default


def dense(matrix: Matrix) -> Tensor:
    """Return the values of a matrix, f32."""
    return matrix.dequantize() if isinstance(matrix, QuantizedTensor) else matrix.float()


def _dense(parts: Sequence[Matrix]) -> Tensor:
    return torch.cat([dense(part) for part in parts]) if len(parts) > 1 else dense(parts[0])


def _shift(part: Affine) -> int:
    """Return what makes the codes of a 4 bit matrix unsigned: symmetric types hold -8..7."""
    return 8 if part.offset is None else 0


def _four_bit(matrix: Matrix) -> Affine | None:
    """Return a 4 bit matrix: as the file has it, or rounded to the nearest. None where the file is finer."""
    if isinstance(matrix, QuantizedTensor):
        return matrix.unpack() if matrix.kind in ("Q4_0", "Q4_1", "Q4_K") else None
    groups = matrix.float().view(len(matrix), -1, _GROUP)
    low = groups.amin(-1)
    scale = ((groups.amax(-1) - low) / 15).clamp(min=1e-12)
    codes = ((groups - low.unsqueeze(-1)) / scale.unsqueeze(-1)).round().to(torch.int8).flatten(1)
    return Affine(codes, scale, low, _GROUP)
