"""Matrix instructions: a CTA's row tiles of one weight matrix times all rows of the step. Must not know: attention.

The producer warp streams the tiles (16 rows x 512 columns, sub-block w for consumer warp w) through a ring in shared
memory; each warp multiplies its columns with activations that it loads straight from global memory into the registers
of the MMA, and the eight partial sums are added in a fixed order. Tensors are (warp, column, row of the step).
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon, mbarrier, mma_v2
from megakernel_runtime.kernels.sync import await_chunks, load_constants, store_pairs

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8]))
# k_width 8: a thread's operands are 16 consecutive bytes, in shared memory (weights) and global memory (activations)
A = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=8))
B = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=8))
# A thread adds all eight partials of rows (2i, 2i + 1) and (2i + 8, 2i + 9): pairs for stores, gate beside up
SUM = gl.constexpr(gl.BlockedLayout([8, 2, 1], [1, 4, 8], [1, 1, 8], [1, 2, 0]))
OUT = gl.constexpr(gl.SliceLayout(0, SUM))
HALF = gl.constexpr(gl.BlockedLayout([2, 1], [4, 8], [1, 8], [0, 1]))


@gluon.jit
def columns(C: gl.constexpr):
    """Layout indices of an activation chunk: column, row."""
    T: gl.constexpr = C.rows
    w = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))
    t = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))
    return w[:, None, None] * 64 + k[None, :, None], t[None, None, :]


@gluon.jit
def no_operand(C: gl.constexpr):
    """Zeros in the place of an activation chunk."""
    T: gl.constexpr = C.rows
    return gl.zeros([8, 64, T], gl.bfloat16, layout=B)


@gluon.jit
def load_operands(x, norm, first, n_rows, K, abort, tag, C: gl.constexpr):
    """Four chunks of x (rows, K) from chunk `first`, zero beyond K, times the norm's weight unless norm is null.

    Returns the four MMA operands and the sums of squares of what they were before, (8, 64, T).
    """
    T: gl.constexpr = C.rows
    column, row = columns(C)
    at = first * 512 + (column & -8)
    on = (at < K).to(gl.int32) + (at + 512 < K) * 2 + (at + 1024 < K) * 4 + (at + 1536 < K) * 8
    on = gl.where(row < n_rows, on, 0)
    pointer = x + (row * K + at)
    squares = gl.zeros([8, 64, T], gl.float32, layout=B)
    if norm.to(gl.int64) != 0:
        q = norm + (at + row * 0)
        w0, w1 = load_constants(q, on & 1), load_constants(q + 512, on & 2)
        w2, w3 = load_constants(q + 1024, on & 4), load_constants(q + 1536, on & 8)
        v0, v1, v2, v3 = await_chunks(pointer, on, abort, tag)
        f0, f1, f2, f3 = v0.to(gl.float32), v1.to(gl.float32), v2.to(gl.float32), v3.to(gl.float32)
        squares = f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3
        v0, v1 = (f0 * w0.to(gl.float32)).to(gl.bfloat16), (f1 * w1.to(gl.float32)).to(gl.bfloat16)
        v2, v3 = (f2 * w2.to(gl.float32)).to(gl.bfloat16), (f3 * w3.to(gl.float32)).to(gl.bfloat16)
    else:
        v0, v1, v2, v3 = await_chunks(pointer, on, abort, tag)
    return v0, v1, v2, v3, squares


@gluon.jit
def multiply(acc, g, smem, operand, C: gl.constexpr):
    """Add the ring's next tile times `operand` to acc; g counts tiles since launch.

    A slot goes back one tile late: only then has every warp's MMA consumed what it read from it.
    """
    S: gl.constexpr = C.stages
    slot = g % S
    mbarrier.wait(smem.full.index(slot), (g // S) & 1)
    acc = mma_v2(smem.ring.index(slot).load(A), operand, acc)
    mbarrier.arrive(smem.empty.index((g + S - 1) % S), count=1, pred=g > 0)
    return acc, g + 1


@gluon.jit
def add_partials(acc, squares, smem, turn, K, normed, C: gl.constexpr):
    """Sum the warps' partials (8, 16, T) to (16, T); if `normed`, times each row's reciprocal root mean square."""
    EPS: gl.constexpr = C.eps
    sums = smem.scratch.index(turn)
    sums.store(acc)
    smem.norms.index(turn).store(gl.sum(squares, axis=1))
    barrier()
    out = gl.sum(sums.load(SUM), axis=0)
    if normed:
        square = gl.sum(smem.norms.index(turn).load(gl.SliceLayout(1, SUM)), axis=0)
        out = out * gl.convert_layout(gl.rsqrt(square / K + EPS), gl.SliceLayout(0, OUT))[None, :]
    return out


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
    T: gl.constexpr = C.rows
    r, t = out_index(tile, C)
    pointer = dst + (t * W + r)
    store_pairs(pointer, pointer + delta, out, 4 * T)


@gluon.jit
def store_gated(dst, delta, tile, out, C: gl.constexpr):
    """Rows 0..7 of `out` are gate, 8..15 up: write silu(gate) * up to 8 columns of dst (T, ffn)."""
    T: gl.constexpr = C.rows
    W: gl.constexpr = C.ffn
    gate, up = gl.split(gl.permute(gl.reshape(out, [2, 8, T]), (1, 2, 0)))
    value = gl.convert_layout(gate / (1.0 + gl.exp(-gate)) * up, HALF)
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, HALF))[:, None]
    t = gl.arange(0, T, layout=gl.SliceLayout(0, HALF))[None, :]
    pointer = dst + (t * W + tile * 8 + r)
    store_pairs(pointer, pointer + delta, value, 4 * T)
