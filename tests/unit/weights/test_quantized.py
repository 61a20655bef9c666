"""Every block type against gguf's own dequantisation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel_runtime.models.gguf_file import BLOCK_TYPES
from megakernel_runtime.weights.quantized import LAYOUTS, QuantizedTensor

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
QUANTISABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # by gguf's Python package


def random_blocks(kind: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Return arbitrary codes, and finite half-precision scales where the type has them: (rows, blocks, bytes)."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(
        0, 256, (rows, blocks, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]), dtype=np.uint8
    )
    for start in HALVES[kind]:
        raw[:, :, start : start + 2] = rng.normal(size=(rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return raw


def theirs(kind: str, raw: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw.reshape(len(raw), -1), gguf.GGMLQuantizationType[kind]))


def test_all_quantised_block_types_have_a_layout():
    assert {b.name: b.elements for b in BLOCK_TYPES.values() if b.elements > 1} == {
        k: v.block_elements for k, v in LAYOUTS.items()
    }


@pytest.mark.parametrize("kind", LAYOUTS)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_values_are_ggmls_bit_for_bit(kind, rows, blocks, seed):
    raw = random_blocks(kind, rows, blocks, seed)
    quantized = QuantizedTensor(kind, torch.from_numpy(raw))
    expected = theirs(kind, raw)
    assert quantized.shape == tuple(expected.shape)
    assert quantized.nbytes == raw.nbytes
    assert torch.equal(quantized.dequantize().view(torch.int32), expected.view(torch.int32))
    assert torch.equal(quantized.dequantize(torch.bfloat16), expected.bfloat16())
    assert torch.equal(quantized.unpack().values(), expected)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_matrices_larger_than_a_chunk(kind):
    raw = random_blocks(kind, 300, 2048 // LAYOUTS[kind].block_elements, 1)
    assert torch.equal(QuantizedTensor(kind, torch.from_numpy(raw)).dequantize(), theirs(kind, raw))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_codes_scales_and_offsets_make_up_the_matrix(kind):
    raw = random_blocks(kind, 5, 3, 2)
    quantized = QuantizedTensor(kind, torch.from_numpy(raw))
    parts = quantized.unpack()
    rows, columns = quantized.shape
    assert parts.codes.shape == (rows, columns)
    assert parts.codes.dtype == torch.int8
    assert parts.scale.shape == (rows, columns // parts.group_size)
    scale = parts.scale.repeat_interleave(parts.group_size, dim=1)
    offset = 0.0 if parts.offset is None else parts.offset.repeat_interleave(parts.group_size, dim=1)
    assert torch.equal(parts.codes * scale + offset, theirs(kind, raw))


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_what_gguf_quantises_comes_back_close(kind):
    values = np.random.default_rng(3).normal(size=(16, 256)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).reshape(
        16, -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    )
    error = QuantizedTensor(kind, torch.from_numpy(raw)).dequantize() - torch.from_numpy(values)
    assert error.abs().max() < 0.5
    assert error.square().mean().sqrt() < 0.12
