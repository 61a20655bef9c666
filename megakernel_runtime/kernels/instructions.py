"""EMBED and the matrix instructions: what each reads, computes and writes. Must not know: attention, steps, plans."""

from __future__ import annotations

from megakernel_runtime.kernels import words as w
from megakernel_runtime.kernels.clocks import accounts_of, now_ns
from megakernel_runtime.kernels.compat import barrier, gl, gluon
from megakernel_runtime.kernels.matrix import (
    MMA,
    OUT,
    B,
    add_partials,
    give_back,
    load_operands,
    multiply_four,
    out_index,
    store_gated,
    store_out,
    sum_of_squares,
)
from megakernel_runtime.kernels.sample import begin_best, publish_best, track_best
from megakernel_runtime.kernels.sync import cta
from megakernel_runtime.program.isa import Op

QKV = gl.constexpr(int(Op.QKV))
OUT_OP = gl.constexpr(int(Op.OUT))
GATE_UP = gl.constexpr(int(Op.GATE_UP))
DOWN = gl.constexpr(int(Op.DOWN))
LM_HEAD = gl.constexpr(int(Op.LM_HEAD))
DEPENDENCY = gl.constexpr(w.DEPENDENCY)


@gluon.jit
def embed(mem, acts, rows, delta, first, count, n_rows, C: gl.constexpr):
    """This CTA's columns of the token embeddings, to the residual stream and its bf16 copy."""
    T: gl.constexpr = C.rows
    H: gl.constexpr = C.hidden
    t = gl.arange(0, T, layout=gl.SliceLayout(0, OUT))
    token = gl.load(rows + t * 8 + 4, mask=t < n_rows, other=0)
    for tile in range(first, first + count):
        r, row = out_index(tile, C)
        value = gl.load(mem.table + (token.to(gl.int64) * H)[None, :] + r).to(gl.float32)
        gl.store(mem.resid + (row * H + r), value)
        store_out(acts, delta, tile, value, H, C)


@gluon.jit
def matrix(ring, turn, mem, smem, acts, delta, work, n_rows, tag, seen, C: gl.constexpr):
    """A matrix instruction. One body for all: a CTA's code must fit its cache.

    ring: see `multiply`. work: op; first row tile, how many; source and destination, element offsets in acts; columns;
    width of the destination; whether to divide by the root mean square of the source's row, the norm's weights being
    in the matrix. seen: where a profile notes when the operands were there.
    """
    op, first, count, src, dst, K, W, normed = work
    H: gl.constexpr = C.hidden
    V: gl.constexpr = C.vocab
    T: gl.constexpr = C.rows
    x = acts + src
    n_chunks = (K + 511) // 512
    short = n_chunks <= 4
    share = 1.0 / K.to(gl.float32)
    residual = (op == OUT_OP) | (op == DOWN)
    waits = accounts_of(mem, cta(C)) + DEPENDENCY
    best, where = begin_best(C)
    if residual & (count > 0):
        barrier()  # the residual stream was written by threads of another warp, maybe by the instruction before
    keep = added(mem, first, first + count, op, W, tag, residual, C)
    squares = gl.zeros([8, T], gl.float32, layout=gl.SliceLayout(1, B))
    # what the registers hold is loaded once for all row tiles; no branch around it, for values that meet after a branch
    # are taken apart and packed again at every use
    if C.has_short:
        some = gl.where(short & (count > 0), n_rows, 0)
        b0, b1, b2, b3 = load_operands(x, 0, some, K, waits, mem.abort, tag, C)
    if C.profile:
        gl.store(seen, now_ns(tag))
    for tile in range(first, first + count):
        r, t = out_index(tile, C)
        add = keep
        keep = added(
            mem, tile + 1, first + count, op, W, tag, residual, C
        )  # of the next tile, long before it is needed
        even = gl.zeros([8, 16, T], gl.float32, layout=MMA)
        odd = gl.zeros([8, 16, T], gl.float32, layout=MMA)
        if not C.has_long:
            even, odd, ring = multiply_four(even, odd, ring, smem, b0, b1, b2, b3, n_chunks, mem.abort, C)
        elif not C.has_short:
            even, odd, ring, squares = multiply_long(ring, smem, mem, x, n_rows, K, normed, waits, tag, C)
        elif short:
            even, odd, ring = multiply_four(even, odd, ring, smem, b0, b1, b2, b3, n_chunks, mem.abort, C)
        else:
            even, odd, ring, squares = multiply_long(ring, smem, mem, x, n_rows, K, normed, waits, tag, C)
        if C.has_short:
            if short & (normed != 0) & (tile == first):
                squares = sum_of_squares(b0, b1, b2, b3)
        both = even + odd
        ring = give_back(both, ring, C)
        out = add_partials(both, squares, normed, share, smem, turn, C) + add
        turn ^= 1
        if op == GATE_UP:
            store_gated(acts + dst, delta, tile, out, C)
        elif op == LM_HEAD:
            gl.store(mem.logits + (t * V + r), out, mask=(r < V) & (t < n_rows))
            best, where = track_best(best, where, out, r, C)
        else:
            if residual:
                gl.store(mem.resid + (t * H + r), out)
            store_out(acts + dst, delta, tile, out, W, C)
    if op == LM_HEAD:
        publish_best(mem.best, best, where, C)
    return ring, turn


@gluon.jit
def multiply_long(ring, smem, mem, x, n_rows, K, normed, waits, tag, C: gl.constexpr):
    """A row tile's products where the operands do not fit the registers: they are loaded for each row tile.

    Returns even, odd, the ring and the operands' sums of squares.
    """
    T: gl.constexpr = C.rows
    even = gl.zeros([8, 16, T], gl.float32, layout=MMA)
    odd = gl.zeros([8, 16, T], gl.float32, layout=MMA)
    squares = gl.zeros([8, T], gl.float32, layout=gl.SliceLayout(1, B))
    n_chunks = (K + 511) // 512
    for chunk in range(0, n_chunks, 4):
        c0, c1, c2, c3 = load_operands(x, chunk, n_rows, K, waits, mem.abort, tag, C)
        if C.norms_long:
            if normed != 0:
                squares += sum_of_squares(c0, c1, c2, c3)
        even, odd, ring = multiply_four(even, odd, ring, smem, c0, c1, c2, c3, n_chunks - chunk, mem.abort, C)
    return even, odd, ring, squares


@gluon.jit
def added(mem, tile, end, op, W, tag, residual, C: gl.constexpr):
    """What is added to the products of a row tile before `end`: the residual stream, or QKV's bias, or zeros."""
    H: gl.constexpr = C.hidden
    BIAS: gl.constexpr = C.qkv_bias
    r, t = out_index(tile, C)
    here = tile < end
    keep = gl.load(mem.resid + (t * H + r), mask=(r < H) & residual & here, other=0.0)
    if BIAS:
        bias = gl.load(mem.bias + (tag & 0xFFFF) * W + r + t * 0, mask=(r < W) & (op == QKV) & here, other=0.0)
        keep += bias.to(gl.float32)
    return keep
