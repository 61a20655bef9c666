"""Matrix instructions: a CTA's row tiles of one weight matrix times all rows of the step. Must not know: attention.

The producer warp streams the tiles (16 rows x 512 columns, sub-block w for consumer warp w) through a ring in shared
memory; each warp multiplies its columns with activations that it loads straight from global memory into the registers
of the MMA, and the eight partial sums are added in a fixed order. Tensors are (warp, column, row of the step).
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon, mma_v2
from megakernel_runtime.kernels.ring import arrive_after, await_phase
from megakernel_runtime.kernels.sync import (
    await_chunks,
    fast_reciprocal,
    load_constants,
    store_pairs,
)

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8]))
A = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2))
B = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2))
# Four lanes share the eight partials of four neighbouring rows: pairs for stores, gate beside up
SUM = gl.constexpr(gl.BlockedLayout([1, 4, 1], [4, 1, 8], [1, 4, 2], [1, 2, 0]))
OUT = gl.constexpr(gl.SliceLayout(0, SUM))


@gluon.jit
def columns(C: gl.constexpr):
    """Of each element of an activation chunk: where its thread's data begin, and the row."""
    T: gl.constexpr = C.rows
    w = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))
    t = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))
    return w[:, None, None] * 64 + ((k & 7) >> 1)[None, :, None] * 8, t[None, None, :]


@gluon.jit
def no_operand(C: gl.constexpr):
    """Zeros in the place of an activation chunk."""
    T: gl.constexpr = C.rows
    return gl.zeros([8, 64, T], gl.bfloat16, layout=B)


@gluon.jit
def load_operands(x, norm, first, n_rows, K, abort, tag, C: gl.constexpr):
    """Four chunks of x (rows, K) from chunk `first`, zero beyond K, times the norm's weight unless norm is null.

    Returns the four MMA operands and each warp's sums of squares of what they were before, (8, T).
    """
    T: gl.constexpr = C.rows
    column, row = columns(C)
    at = first * 512 + column
    on = (at < K).to(gl.int32) + (at + 512 < K) * 2 + (at + 1024 < K) * 4 + (at + 1536 < K) * 8  # K: a multiple of 64
    on = gl.where(row < n_rows, on, 0)
    pointer = x + (row * K + at)
    squares = gl.zeros([8, T], gl.float32, layout=gl.SliceLayout(1, B))
    if norm.to(gl.int64) != 0:
        q = norm + (at + row * 0)
        w0, w1 = load_constants(q, on & 1), load_constants(q + 512, on & 2)
        w2, w3 = load_constants(q + 1024, on & 4), load_constants(q + 1536, on & 8)
        v0, v1, v2, v3 = await_chunks(pointer, on, abort, tag)
        f0, f1, f2, f3 = v0.to(gl.float32), v1.to(gl.float32), v2.to(gl.float32), v3.to(gl.float32)
        squares = gl.sum(f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3, axis=1)
        v0, v1 = (f0 * w0.to(gl.float32)).to(gl.bfloat16), (f1 * w1.to(gl.float32)).to(gl.bfloat16)
        v2, v3 = (f2 * w2.to(gl.float32)).to(gl.bfloat16), (f3 * w3.to(gl.float32)).to(gl.bfloat16)
    else:
        v0, v1, v2, v3 = await_chunks(pointer, on, abort, tag)
    return v0, v1, v2, v3, squares


@gluon.jit
def multiply(acc, before, ring, smem, operand, abort, C: gl.constexpr):
    """Add the ring's next tile times `operand` to acc; give the slot before back, whose product is in `before`.

    ring: slot, phase, the address of the barrier that gives the last tile's slot back, 0 for none, and cycles waited.
    """
    S: gl.constexpr = C.stages
    slot, phase, last, waited = ring
    waited += await_phase(smem.full_at + slot * 8, phase, abort)
    acc = mma_v2(smem.ring.index(slot).load(A), operand, acc)
    arrive_after(before, last, C)
    wraps = slot == S - 1
    return acc, (gl.where(wraps, 0, slot + 1), phase ^ wraps.to(gl.int32), smem.empty_at + slot * 8, waited)


@gluon.jit
def add_partials(acc, smem, turn, C: gl.constexpr):
    """Sum the warps' partials (8, 16, T) to (16, T)."""
    T: gl.constexpr = C.rows
    sums = smem.scratch.index(turn)
    sums.store(gl.reshape(acc, [8, 16 * T]))
    barrier()
    return gl.sum(sums.reshape([8, 16, T]).load(SUM), axis=0)


@gluon.jit
def root_mean_squares(squares, smem, turn, share, C: gl.constexpr):
    """Reciprocal root mean square of each row, (T,), from the warps' sums of squares (8, T); share: 1 / columns."""
    EPS: gl.constexpr = C.eps
    norms = smem.norms.index(turn)
    norms.store(squares)
    barrier()
    square = gl.sum(norms.load(gl.SliceLayout(1, SUM)), axis=0)
    return gl.convert_layout(gl.rsqrt(square * share + EPS), gl.SliceLayout(0, OUT))


@gluon.jit
def out_index(tile, C: gl.constexpr):
    """Matrix row and step row of each element of a row tile's result."""
    T: gl.constexpr = C.rows
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, OUT))[:, None]
    t = gl.arange(0, T, layout=gl.SliceLayout(0, OUT))[None, :]
    return tile * 16 + r, t


@gluon.jit
def store_out(dst, delta, tile, out, W, C: gl.constexpr):
    """Write (16, T) to rows of dst (T, W) as bf16, and empty the same words of the other step parity."""
    r, t = out_index(tile, C)
    pointer = dst + (t * W + r)
    store_pairs(pointer, pointer + delta, out, 256)


@gluon.jit
def store_gated(dst, delta, tile, out, C: gl.constexpr):
    """Rows of `out` are gate and up in turn: write silu(gate) * up to 8 columns of dst (T, ffn)."""
    T: gl.constexpr = C.rows
    W: gl.constexpr = C.ffn
    gate, up = gl.split(gl.permute(gl.reshape(out, [8, 2, T]), (0, 2, 1)))
    value = gate * up * fast_reciprocal(1.0 + gl.exp2(gate * -1.4426950408889634))
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, value.type.layout))[:, None]
    t = gl.arange(0, T, layout=gl.SliceLayout(0, value.type.layout))[None, :]
    pointer = dst + (t * W + tile * 8 + r)
    store_pairs(pointer, pointer + delta, value, 256)
