"""EMBED and the matrix instructions: what each reads, computes and writes. Must not know: attention, steps, plans."""

from __future__ import annotations

from megakernel_runtime.kernels import words as w
from megakernel_runtime.kernels.clocks import account_since, accounts_of, now_ns, ticks
from megakernel_runtime.kernels.compat import gl, gluon
from megakernel_runtime.kernels.matrix import (
    MMA,
    OUT,
    B,
    add_partials,
    load_operands,
    multiply,
    no_operand,
    out_index,
    root_mean_squares,
    store_gated,
    store_out,
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
def matrix(
    ring, turn, mem, smem, acts, delta, op, first, count, src, dst, K, W, norm, n_rows, tag, seen, C: gl.constexpr
):
    """A matrix instruction over `count` row tiles from `first`. One body for all: a CTA's code must fit its cache.

    ring: see `multiply`. src, dst: element offsets in acts. K: columns. W: width of dst.
    norm: null for none. seen: where a profile notes when the operands were there.
    """
    H: gl.constexpr = C.hidden
    V: gl.constexpr = C.vocab
    T: gl.constexpr = C.rows
    BIAS: gl.constexpr = C.qkv_bias
    x = acts + src
    n_chunks = (K + 511) // 512
    share = 1.0 / K.to(gl.float32)
    normed = norm.to(gl.int64) != 0
    residual = (op == OUT_OP) | (op == DOWN)
    b0, b1, b2, b3 = no_operand(C), no_operand(C), no_operand(C), no_operand(C)
    squares = gl.zeros([8, T], gl.float32, layout=gl.SliceLayout(1, B))
    scale = gl.full([T], 1.0, gl.float32, layout=gl.SliceLayout(0, OUT))
    best, where = begin_best(C)
    for tile in range(first, first + count):
        r, t = out_index(tile, C)
        even = gl.zeros([8, 16, T], gl.float32, layout=MMA)
        odd = gl.zeros([8, 16, T], gl.float32, layout=MMA)
        keep = gl.load(mem.resid + (t * H + r), mask=(r < H) & residual, other=0.0)
        for chunk in range(0, n_chunks, 4):
            if (n_chunks > 4) | (tile == first):
                begun = ticks(tile)
                b0, b1, b2, b3, square = load_operands(x, norm, chunk, n_rows, K, mem.abort, tag, C)
                squares = gl.where(chunk == 0, square, squares + square)
                account_since(accounts_of(mem, cta(C)) + DEPENDENCY, begun, C)
                if C.profile:
                    gl.store(seen, now_ns(tile))
            even, ring = multiply(even, odd, ring, smem, b0, mem.abort, C)
            if chunk + 1 < n_chunks:
                odd, ring = multiply(odd, even, ring, smem, b1, mem.abort, C)
            if chunk + 2 < n_chunks:
                even, ring = multiply(even, odd, ring, smem, b2, mem.abort, C)
            if chunk + 3 < n_chunks:
                odd, ring = multiply(odd, even, ring, smem, b3, mem.abort, C)
        if normed & ((n_chunks > 4) | (tile == first)):
            scale = root_mean_squares(squares, smem, turn, share, C)
        out = add_partials(even + odd, smem, turn, C) * scale[None, :] + keep
        turn ^= 1
        if op == GATE_UP:
            store_gated(acts + dst, delta, tile, out, C)
        elif op == LM_HEAD:
            gl.store(mem.logits + (t * V + r), out, mask=(r < V) & (t < n_rows))
            best, where = track_best(best, where, out, r, C)
        else:
            if BIAS:
                if op == QKV:
                    out += gl.load(mem.bias + (tag & 0xFFFF) * W + r + t * 0).to(gl.float32)
            if residual:
                gl.store(mem.resid + (t * H + r), out)
            store_out(acts + dst, delta, tile, out, W, C)
    if op == LM_HEAD:
        publish_best(mem.best, best, where, C)
    return ring, turn
