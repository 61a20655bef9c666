"""The Gluon names that changed between Triton releases, behind one spelling. Must not know: any instruction.

Gluon is marked experimental; everything else under kernels/ imports these names from here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
constexpr_function = gluon.constexpr_function

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """View shared memory as another type and shape."""
        return memory.reinterpret(dtype, shape, layout)
else:

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """View shared memory as another type and shape."""
        return memory._reinterpret(dtype, shape, layout)


__all__ = ["barrier", "constexpr_function", "fence_async_shared", "gl", "gluon", "mbarrier", "mma_v2", "reinterpret"]
