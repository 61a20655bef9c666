"""Every Triton kernel compiles, without a GPU, for the oldest and newest devices that it is meant for."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megakernel_runtime.backends.graphs.device import attention, choose, rope, rows, sample
from megakernel_runtime.backends.graphs.device.constants import Constants
from megakernel_runtime.backends.graphs.ops import make_tables
from megakernel_runtime.interface import Capacity
from tests.unit.backends.graphs.scenes import TINY

MODELS = {
    "llama-1b": replace(
        TINY, vocab_size=128256, hidden_size=2048, n_heads=32, n_kv_heads=8, head_dim=64, ffn_size=8192, n_layers=1
    ),
    "qwen3-8b": replace(
        TINY, vocab_size=151936, hidden_size=4096, n_heads=32, n_kv_heads=8, head_dim=128, qk_norm=True, n_layers=1
    ),
    "head-96": replace(
        TINY,
        vocab_size=32064,
        hidden_size=3072,
        n_heads=32,
        n_kv_heads=32,
        head_dim=96,
        sliding_window=2048,
        n_layers=1,
    ),
    "smollm2": replace(
        TINY, vocab_size=49152, hidden_size=576, n_heads=9, n_kv_heads=3, head_dim=64, ffn_size=1536, n_layers=1
    ),
}
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}  # of one block, CUDA C++ guide
F, I = "*fp32", "*i32"


def kernels(c, x):
    """Name -> (kernel, types of its pointers and integers, constants, warps); `x` is the activations' type."""
    lists, peaks = [F, I], [F, I]
    return {
        "write_words": (rows.write_words_kernel, [I, I, "i32"], {"BLOCK": 256}, 4),
        "embed": (rows.embed_kernel, [x, I, I, I, F, I, I], c.embed, 4),
        "add_norm": (rows.add_norm_kernel, [F, x, x, I, x], {**c.norm, "ADD": True, "GATHER": False}, c.norm_warps),
        "norm_outs": (rows.add_norm_kernel, [F, x, x, I, x], {**c.norm, "ADD": True, "GATHER": True}, c.norm_warps),
        "silu_mul": (rows.silu_mul_kernel, [x, x], {"F": 1536, "BLOCK": c.row_block}, 4),
        "rope": (rope.rope_kernel, [x, x, I, I, F, F, x, x], c.rope, 2),
        "plan_spans": (attention.plan_spans_kernel, [I, I, I, I, "i32"], c.plan, 4),
        "attend_spans": (attention.attend_spans_kernel, [x, x, I, I, I, I, I, F, F, F, I, x], c.spans, 4),
        "attend_blocks": (attention.attend_blocks_kernel, [x, x, I, I, x], c.blocks, 4),
        "adjust": (sample.adjust_kernel, [F, I, I, I, I, F], c.adjust, 4),
        "peaks": (sample.peaks_kernel, [F, I, I, I, *peaks], c.peaks, 4),
        "logprobs": (sample.logprobs_kernel, [F, I, I, I, *peaks, F, I, F, *lists], c.logprobs, 16),
        "mask": (sample.mask_kernel, [F, I, I, I, I, I], c.mask, 4),
        "choose": (choose.choose_kernel, [F, I, I, I, I, I, I, *peaks, F, I, *lists], {**c.choose, "FULL": True}, 16),
        "choose-plain": (
            choose.choose_kernel, [F, I, I, I, I, I, I, *peaks, F, I, *lists], {**c.choose, "FULL": False}, 16
        ),
    }  # fmt: skip


def compiled(model, x, capability, name):
    config = MODELS[model]
    dtype = torch.float32 if x == F else torch.bfloat16
    capacity = Capacity(2, 4, 32, 64, 64, 1, 1, config.vocab_size)
    constants = Constants(make_tables(config, capacity, torch.device("cpu"), dtype))
    kernel, types, values, warps = kernels(constants, x)[name]
    runtime = [argument for argument in kernel.arg_names if argument not in values]
    signature = dict(zip(runtime, types, strict=True)) | dict.fromkeys(values, "constexpr")
    aligned = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
        for argument, kind in zip(runtime, types, strict=True)
        if kind.startswith("*")
    }
    options = {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": True}
    source = ASTSource(kernel, signature, dict(values), aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


NAMES = list(
    kernels(Constants(make_tables(TINY, Capacity(1, 1, 4, 4, 4, 1, 1, 300), torch.device("cpu"), torch.float32)), F)
)
SHAPED = ["rope", "plan_spans", "attend_spans", "attend_blocks", "add_norm"]  # that differ by more than sizes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability, name):
    kernel = compiled("llama-1b", "*bf16", capability, name)
    assert kernel.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("model", ["qwen3-8b", "head-96", "smollm2"])
def test_other_shapes_compile_for_the_smallest_shared_memory(model, name):
    kernel = compiled(model, "*bf16", 86, name)
    assert kernel.metadata.shared <= SHARED_BYTES[86]


@pytest.mark.parametrize("name", ["attend_spans", "attend_blocks"])
def test_proofs_in_f32_compile(name):
    kernel = compiled("llama-1b", F, 90, name)
    assert kernel.metadata.shared <= SHARED_BYTES[90]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_for_blackwell(name):
    kernel = compiled("smollm2", "*bf16", 120, name)
    assert kernel.metadata.shared <= SHARED_BYTES[120]
