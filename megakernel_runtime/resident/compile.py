"""Compile a kernel variant without a GPU, to know its registers, spills and shared memory. Must not know: launches."""

# pyright: basic
# Triton is untyped.

from __future__ import annotations

from typing import Any

from megakernel_runtime.kernels.entry import megakernel
from megakernel_runtime.kernels.memory import Memory
from megakernel_runtime.kernels.shape import KernelShape

BF16 = ("acts", "table", "bias", "qk_norms", "kv")
FP32 = ("resid", "cos", "sin", "logits")
I64 = ("prof", "accounts", "partials")


def signature() -> dict[str, str]:
    """Return the kernel's parameters and their types in Triton's spelling; pointers not named above are i32."""
    pointers = {
        name: "*bf16" if name in BF16 else "*fp32" if name in FP32 else "*i64" if name in I64 else "*i32"
        for name in Memory._fields
    }
    return {"tape": "*bf16"} | pointers | {"done": "i32", "park_ns": "i64", "nonce": "i64"} | {"C": "constexpr"}


def compile_for(shape: KernelShape, capability: int) -> Any:
    """Return Triton's compiled kernel (`asm`, `metadata`) for GPUs of `capability`, e.g. 90 for Hopper."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel
    from triton.experimental.gluon._runtime import GluonASTSource

    kinds = signature()
    names = list(kinds)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if kinds[name].startswith("*")}
    source = GluonASTSource(megakernel, kinds, {(names.index("C"),): shape}, attrs=aligned)
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
