"""Every format of a matrix against its exact product, and what falls back to what."""

import pytest
import torch

from megakernel_runtime.backends.cpu.linear import (
    FORMATS,
    Bf16Linear,
    Fp16Linear,
    Fp32Linear,
    Int4Linear,
    Int8Linear,
    default_format,
    dense,
    make_linear,
)
from megakernel_runtime.weights.quantized import QuantizedTensor

DEFAULT = Fp16Linear if default_format() == "fp16" else Fp32Linear


def weight(rows=48, columns=96, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1


def quantized(kind, rows=32, columns=256, seed=0):
    import gguf

    values = weight(rows, columns, seed).numpy()
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    return QuantizedTensor(kind, torch.from_numpy(blocks).view(rows, -1, block_bytes))


def error(linear, exact, bias=None, n_rows=5):
    """Relative error of a product of random rows, the inputs taken as the format takes them."""
    x = torch.randn(n_rows, exact.shape[1], generator=torch.Generator().manual_seed(1)).to(linear.dtype)
    y = linear(x)
    assert y.dtype is linear.dtype
    expected = x.double() @ exact.double().T + (0 if bias is None else bias.double())
    return ((y.double() - expected).norm() / expected.norm()).item()


BOUNDS = {"fp32": 1e-6, "fp16": 5e-4, "bf16": 5e-3, "int8": 1e-2, "int4": 0.12}


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("n_rows", [1, 5, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(weight_format, n_rows, with_bias):
    parts = [weight(32, seed=1), weight(16, seed=2), weight(16, seed=3)]
    bias = torch.randn(64, generator=torch.Generator().manual_seed(4)) if with_bias else None
    linear = make_linear(parts, bias, weight_format)
    assert error(linear, torch.cat(parts), bias, n_rows) < BOUNDS[weight_format]


def test_formats_have_their_kernels():
    kinds = {f: type(make_linear([weight()], None, f)) for f in FORMATS}
    assert kinds == {"fp32": Fp32Linear, "fp16": Fp16Linear, "bf16": Bf16Linear, "int8": Int8Linear, "int4": Int4Linear}


def test_f16_weights_of_bf16_files_are_exact():
    values = weight().bfloat16()
    assert error(make_linear([values], None, "fp16"), values.float()) < 1e-6


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_keeps_the_codes_of_four_bit_files(kind):
    matrix = quantized(kind)
    linear = make_linear([matrix], None, "int4")
    assert isinstance(linear, Int4Linear)
    assert error(linear, matrix.dequantize()) < 5e-3  # what bf16 scales and results cost; 4 bit rounding costs 0.1
    assert linear.nbytes == 32 * 256 // 2 + 32 * 8 * 2 * 2


def test_int4_takes_scales_of_super_blocks_too():
    blocks = torch.randint(0, 256, (32, 2, 144), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    blocks[:, :, 1] &= 0x3B  # two f16 numbers, kept small and finite
    blocks[:, :, 3] &= 0x3B
    matrix = QuantizedTensor("Q4_K", blocks)
    linear = make_linear([matrix], None, "int4")
    assert isinstance(linear, Int4Linear)
    assert error(linear, matrix.dequantize()) < 2e-2


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q5_1"])
def test_finer_files_are_not_coarsened_to_int4(kind):
    parts = [quantized("Q4_1", seed=1), quantized(kind, seed=2)]
    linear = make_linear(parts, None, "int4")
    assert isinstance(linear, DEFAULT)
    assert error(linear, torch.cat([part.dequantize() for part in parts])) < 5e-4


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(47, 96), (48, 90)])
def test_sizes_without_a_kernel_take_the_default(weight_format, shape):
    linear = make_linear([weight(*shape)], None, weight_format)
    assert isinstance(linear, DEFAULT)
    assert error(linear, weight(*shape)) < 5e-4


def test_default_without_the_f16_kernel_is_f32(monkeypatch):
    monkeypatch.setattr("megakernel_runtime.backends.cpu.linear._has_f16_kernel", lambda: False)
    assert default_format() == "fp32"
    assert isinstance(make_linear([weight(47)], None, "int8"), Fp32Linear)


def test_constant_rows_and_zeros_survive_rounding():
    values = torch.zeros(32, 64)
    values[1] = 0.5
    for weight_format in ("int8", "int4"):
        y = make_linear([values], None, weight_format)(torch.ones(1, 64, dtype=torch.bfloat16))
        assert y.float()[0, :3].tolist() == pytest.approx([0.0, 32.0, 0.0], abs=0.2)


def test_dense_gives_f32():
    assert dense(weight().bfloat16()).dtype is torch.float32
    assert torch.equal(dense(quantized("Q4_1")), quantized("Q4_1").dequantize())
