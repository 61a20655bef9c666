"""Matrix instructions: a CTA's row tiles of one weight matrix times all rows of the step. Must not know: attention.

The producer warp streams the tiles (16 rows x 512 columns, sub-block w for consumer warp w) through a ring in shared
memory; each warp multiplies its columns with activations that it loads straight from global memory into the registers
of the MMA, and the eight partial sums are added in a fixed order. Tensors are (warp, column, row of the step).
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon, mma_v2
from megakernel_runtime.kernels.ring import arrive_after, await_phase
from megakernel_runtime.kernels.sync import await_chunks, fast_reciprocal, store_pairs

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
def load_operands(x, first, n_rows, K, account, abort, tag, C: gl.constexpr):
    """Four chunks of x (rows, K) from chunk `first` as MMA operands, zero beyond K."""
    column, row = columns(C)
    at = first * 512 + column
    on = (at < K).to(gl.int32) + (at + 512 < K) * 2 + (at + 1024 < K) * 4 + (at + 1536 < K) * 8  # K: a multiple of 64
    on = gl.where(row < n_rows, on, 0)
    return await_chunks(x + (row * K + at), on, account, abort, tag, C)


MMA_SYNC = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _squares() -> str:
    """Assembly of `sum_of_squares`: a thread's 16 elements of four chunks are the operands of 16 MMAs, on both sides.

    The first output is the diagonal element that the thread holds, or 0; the others are 0.
    """
    lines = [".reg .f32 c<4>, d<4>;", ".reg .b32 z, l, q;", ".reg .pred p;", "mov.b32 z, 0;"]
    lines += [f"mov.f32 c{i}, 0f00000000; mov.f32 d{i}, 0f00000000;" for i in range(4)]
    for m in range(16):
        acc = ", ".join(f"{'cd'[m % 2]}{i}" for i in range(4))
        x, y = f"${16 + 2 * m}", f"${17 + 2 * m}"
        lines.append(f"{MMA_SYNC} {{{acc}}}, {{{x}, z, {y}, z}}, {{{x}, {y}}}, {{{acc}}};")
    lines += ["add.f32 c0, c0, d0; add.f32 c1, c1, d1;", "mov.u32 l, %laneid; and.b32 q, l, 3; shr.b32 l, l, 2;"]
    lines += ["shl.b32 q, q, 1; sub.s32 l, l, q;", "setp.eq.s32 p, l, 1; selp.f32 c0, c1, c0, p;"]
    lines += ["setp.lt.u32 p, l, 2; selp.f32 $0, c0, 0f00000000, p;"]
    lines += [f"mov.f32 ${i}, 0f00000000;" for i in range(1, 16)]
    return "{ " + "\n".join(lines) + " }"


SQUARES = gl.constexpr(_squares())
SQUARES_OPERANDS = gl.constexpr(",".join(["=&f"] * 16 + ["r"] * 32))


@gluon.jit
def sum_of_squares(v0, v1, v2, v3):
    """Each warp's sums of squares of four chunks, (8, T): the diagonal of x^T x, by the tensor cores.

    A thread holds the same elements of x as the operand of either side, so that nothing has to move.
    """
    parts = gl.inline_asm_elementwise(
        SQUARES, SQUARES_OPERANDS, [v0, v1, v2, v3], dtype=gl.float32, is_pure=False, pack=16
    )
    return gl.sum(parts, axis=1)


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
def multiply_four(even, odd, ring, smem, b0, b1, b2, b3, left, abort, C: gl.constexpr):
    """Add the products of up to four tiles, `left`, to even and odd in turns."""
    even, ring = multiply(even, odd, ring, smem, b0, abort, C)
    if left > 1:
        odd, ring = multiply(odd, even, ring, smem, b1, abort, C)
    if left > 2:
        even, ring = multiply(even, odd, ring, smem, b2, abort, C)
    if left > 3:
        odd, ring = multiply(odd, even, ring, smem, b3, abort, C)
    return even, odd, ring


@gluon.jit
def give_back(acc, ring, C: gl.constexpr):
    """Give the last tile's slot back, whose product is in acc."""
    slot, phase, last, waited = ring
    arrive_after(acc, last, C)
    return slot, phase, last * 0, waited


@gluon.jit
def add_partials(acc, squares, normed, share, smem, turn, C: gl.constexpr):
    """Sum the warps' partials (8, 16, T) to (16, T); if `normed`, divided by the root mean square of each row, from the
    warps' sums of squares (8, T).
    """
    T: gl.constexpr = C.rows
    EPS: gl.constexpr = C.eps
    sums = smem.scratch.index(turn)
    norms = smem.norms.index(turn)
    if normed != 0:
        norms.store(squares)
    sums.store(gl.reshape(acc, [8, 16 * T]))
    barrier()
    out = gl.sum(sums.reshape([8, 16, T]).load(SUM), axis=0)
    if normed != 0:
        square = gl.convert_layout(gl.sum(norms.load(gl.SliceLayout(1, SUM)), axis=0), gl.SliceLayout(0, OUT))
        out = out * gl.rsqrt(square * share + EPS)[None, :]
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
