"""Clocks of the GPU and of its SMs, and the time accounts of each CTA. Must not know: any instruction."""

from __future__ import annotations

from megakernel_runtime.kernels import words as w
from megakernel_runtime.kernels.compat import gl, gluon

ACCOUNTS = gl.constexpr(w.ACCOUNTS)


@gluon.jit
def now_ns(after):
    """The GPU's nanosecond clock; `after`: any value that must exist first."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; // $1", "=l,r", [after], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def clock(after):
    """This SM's cycle counter; `after`: any value that must exist first."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %clock64; // $1", "=l,r", [after], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def accounts_of(mem, c):
    """Where a CTA's accounts are; see words.py."""
    return mem.accounts + c * ACCOUNTS


@gluon.jit
def store_clock(pointer, after):
    """Tell the host the GPU's nanosecond clock, at `pointer` in pinned memory; `after`: any value that must exist."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; .reg .b64 n; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; mov.u64 n, %globaltimer;
@p st.relaxed.sys.global.b64 [$1], n; mov.b32 $0, $2; }""",
        "=r,l,r",
        [pointer.to(gl.int64), after],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def account(account_at, cycles, C: gl.constexpr):
    """Add a number of clock cycles to a CTA's account, as its first thread counts them."""
    if C.telemetry:
        gl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
@p red.relaxed.gpu.global.add.u64 [$1], $2; mov.b32 $0, 0; }""",
            "=r,l,l",
            [account_at.to(gl.int64), cycles.to(gl.int64)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
