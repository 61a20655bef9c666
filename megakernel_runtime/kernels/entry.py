"""The resident kernel: one CTA an SM, a producer warp that streams weights, eight consumer warps that run instructions.

Must not know: where plans come from.
"""

from __future__ import annotations

from megakernel_runtime.kernels.attend import attend, prefetch, span_count
from megakernel_runtime.kernels.compat import gl, gluon, mbarrier, tma_load
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
from megakernel_runtime.kernels.memory import Memory, Shared
from megakernel_runtime.kernels.ring import await_phase, locate
from megakernel_runtime.kernels.sample import begin_best, publish_best, sample, track_best
from megakernel_runtime.kernels.sync import await_counter, cta, now_ns, signal
from megakernel_runtime.program.isa import Op

EMBED = gl.constexpr(int(Op.EMBED))
QKV = gl.constexpr(int(Op.QKV))
ATTEND = gl.constexpr(int(Op.ATTEND))
OUT_OP = gl.constexpr(int(Op.OUT))
GATE_UP = gl.constexpr(int(Op.GATE_UP))
DOWN = gl.constexpr(int(Op.DOWN))
LM_HEAD = gl.constexpr(int(Op.LM_HEAD))
SAMPLE = gl.constexpr(int(Op.SAMPLE))
# of an instruction: op, layer, first row tile, row tiles, source, destination, columns, width, norm row or -1
WORDS = gl.constexpr(12)
LINE = gl.constexpr(32)  # words of a cache line: one counter each


@gluon.jit
def producer(mem, smem, tape, steps, C: gl.constexpr):
    """Streams this CTA's tiles step after step, as far ahead as the ring has room, without waiting for activations."""
    S: gl.constexpr = C.stages
    c = cta(C)
    start = gl.load(mem.meta + 4 * c)
    n = gl.load(mem.meta + 4 * c + 1)
    g = 0
    for _ in range(steps):
        for i in range(n):
            slot = g % S
            await_phase(smem.empty_at + slot * 8, ((g // S) & 1) ^ 1, mem.abort)
            mbarrier.expect(smem.full.index(slot), 8 * 16 * 64 * 2)
            tma_load(tape, [(start + i) * 8, 0, 0], smem.full.index(slot), smem.ring.index(slot))
            g += 1


@gluon.jit
def embed(mem, acts, rows, delta, first, count, n_rows, C: gl.constexpr):
    """This CTA's columns of the token embeddings, to the residual stream and its bf16 copy."""
    T: gl.constexpr = C.rows
    H: gl.constexpr = C.hidden
    MAX: gl.constexpr = C.max_len
    t = gl.arange(0, T, layout=gl.SliceLayout(0, OUT))
    slot = gl.load(rows + t * 4, mask=t < n_rows, other=0)
    pos = gl.load(rows + t * 4 + 1, mask=t < n_rows, other=0)
    token = gl.load(mem.tokens + slot * MAX + pos, mask=t < n_rows, other=0)
    for tile in range(first, first + count):
        r, row = out_index(tile, C)
        value = gl.load(mem.table + (token.to(gl.int64) * H)[None, :] + r).to(gl.float32)
        gl.store(mem.resid + (row * H + r), value)
        store_out(acts, delta, tile, value, H, C)


@gluon.jit
def matrix(ring, turn, mem, smem, acts, delta, op, first, count, src, dst, K, W, norm, n_rows, tag, C: gl.constexpr):
    """A matrix instruction over `count` row tiles from `first`. One body for all: a CTA's code must fit its cache.

    ring: see `multiply`. src, dst: element offsets in acts. K: columns. W: width of dst.
    norm: null for none.
    """
    H: gl.constexpr = C.hidden
    V: gl.constexpr = C.vocab
    T: gl.constexpr = C.rows
    BIAS: gl.constexpr = C.qkv_bias
    PROF: gl.constexpr = C.sync_profile
    x = acts + src
    n_chunks = (K + 511) // 512
    share = 1.0 / K.to(gl.float32)
    normed = norm.to(gl.int64) != 0
    residual = (op == OUT_OP) | (op == DOWN)
    b0, b1, b2, b3 = no_operand(C), no_operand(C), no_operand(C), no_operand(C)
    squares = gl.zeros([8, T], gl.float32, layout=gl.SliceLayout(1, B))
    scale = gl.full([T], 1.0, gl.float32, layout=gl.SliceLayout(0, OUT))
    best, where = begin_best(C)
    waited = gl.to_tensor(0).to(gl.int64)
    for tile in range(first, first + count):
        r, t = out_index(tile, C)
        even = gl.zeros([8, 16, T], gl.float32, layout=MMA)
        odd = gl.zeros([8, 16, T], gl.float32, layout=MMA)
        keep = gl.load(mem.resid + (t * H + r), mask=(r < H) & residual, other=0.0)
        for chunk in range(0, n_chunks, 4):
            if (n_chunks > 4) | (tile == first):
                if PROF:
                    waited -= now_ns(tile)
                b0, b1, b2, b3, square = load_operands(x, norm, chunk, n_rows, K, mem.abort, tag, C)
                squares = gl.where(chunk == 0, square, squares + square)
                if PROF:
                    waited += now_ns(tile)
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
                    out += gl.load(mem.bias + (tag & 0xFFFF) * W - W + r + t * 0).to(gl.float32)
            if residual:
                gl.store(mem.resid + (t * H + r), out)
            store_out(acts + dst, delta, tile, out, W, C)
    if op == LM_HEAD:
        publish_best(mem.best, best, where, C)
    return ring, turn, waited


@gluon.jit
def most_spans(rows, n_rows, C: gl.constexpr):
    """The largest number of attention spans that any row of the step has, at least 1."""
    T: gl.constexpr = C.rows
    t = gl.arange(0, T, layout=gl.SliceLayout(0, OUT))
    count, _first, _lo = span_count(gl.load(rows + t * 4 + 1, mask=t < n_rows, other=0), C)
    return gl.maximum(gl.max(count, axis=0), 1)


@gluon.jit
def consumer(mem, smem, steps, n_rows, C: gl.constexpr):
    """Runs this CTA's instructions for `steps` steps."""
    G: gl.constexpr = C.grid
    T: gl.constexpr = C.rows
    H: gl.constexpr = C.hidden
    SIZE: gl.constexpr = C.step_elements
    PSIZE: gl.constexpr = C.partial_elements
    PROF: gl.constexpr = C.sync_profile
    c = cta(C)
    at = gl.load(mem.meta + 4 * c + 2)
    n_code = gl.load(mem.meta + 4 * c + 3)
    ring = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    turn = 0
    for s in range(steps):
        # every step's sampled rows, and with them all that CTAs did before, are visible from here on
        await_counter(mem.counters + LINE, s * G, mem.abort, 1)
        parity = s & 1
        acts = mem.acts + parity * SIZE
        partials = mem.partials + parity * PSIZE
        delta = SIZE - 2 * SIZE * parity
        other = PSIZE - 2 * PSIZE * parity
        rows = mem.rows + parity * (T * 4)
        next_rows = mem.rows + (1 - parity) * (T * 4)
        spans = most_spans(rows, n_rows, C)
        word = mem.code + at * WORDS
        for i in range(n_code):
            op = gl.load(word)
            layer = gl.load(word + 1)
            first = gl.load(word + 2)
            count = gl.load(word + 3)
            src = gl.load(word + 4)
            dst = gl.load(word + 5)
            columns = gl.load(word + 6)
            width = gl.load(word + 7)
            norm_row = gl.load(word + 8)
            word += WORDS
            tag = op * 65536 + layer + 1
            if PROF:
                gl.store(mem.prof + (i * G + c) * 3, now_ns(tag))
            if op == ATTEND:
                attend(mem, smem, acts, partials, rows, delta, other, layer, n_rows, spans, tag, C)
            elif op == EMBED:
                embed(mem, acts, rows, delta, first, count, n_rows, C)
            elif op == SAMPLE:
                signal(mem.counters)
                if c < n_rows:
                    await_counter(mem.counters, (s + 1) * G, mem.abort, tag)
                    sample(mem, rows, next_rows, c, C)
                signal(mem.counters + LINE)
            else:
                if op == QKV:
                    prefetch(mem, rows, layer, n_rows, spans, C)
                norm = gl.where(norm_row < 0, gl.to_tensor(0).to(gl.int64), (mem.norm + norm_row * H).to(gl.int64)).to(
                    gl.pointer_type(gl.bfloat16)
                )
                ring, turn, waited = matrix(
                    ring, turn, mem, smem, acts, delta, op, first, count, src, dst, columns, width, norm, n_rows, tag, C
                )
                if PROF:
                    gl.store(mem.prof + (i * G + c) * 3 + 2, waited)
            if PROF:
                gl.store(mem.prof + (i * G + c) * 3 + 1, now_ns(tag))
        if c == 0:
            gl.store(mem.stamps + s, now_ns(s))


@gluon.jit
def megakernel(
    tape,
    meta,
    code,
    acts,
    partials,
    resid,
    table,
    norm,
    bias,
    qk_norms,
    cos,
    sin,
    kv,
    pages,
    tokens,
    lens,
    rows,
    logits,
    best,
    counters,
    abort,
    stamps,
    prof,
    steps,
    n_rows,
    nonce,
    C: gl.constexpr,
):
    """Entry. Grid: `C.grid` CTAs, all co-resident; 8 warps and one producer warp each."""
    S: gl.constexpr = C.stages
    T: gl.constexpr = C.rows
    D: gl.constexpr = C.head_dim
    mem = Memory(
        meta,
        code,
        acts,
        partials,
        resid,
        table,
        norm,
        bias,
        qk_norms,
        cos,
        sin,
        kv,
        pages,
        tokens,
        lens,
        rows,
        logits,
        best,
        counters,
        abort,
        stamps,
        prof,
    )
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    full_at = locate(full, nonce)
    empty_at = locate(empty, nonce + 1)
    smem = Shared(
        gl.allocate_shared_memory(gl.bfloat16, [S, 8, 16, 64], tape.layout),
        full,
        empty,
        full_at,
        empty_at,
        gl.allocate_shared_memory(gl.float32, [2, 8, 16 * T], gl.SwizzledSharedLayout(8, 1, 4, [1, 0])),
        gl.allocate_shared_memory(gl.float32, [2, 8, T], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [2, 8, 16, D], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])),
        gl.allocate_shared_memory(gl.float32, [2, 8, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [16, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [16, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
    )
    for i in gl.static_range(S):
        mbarrier.init(smem.full.index(i), count=1)
        mbarrier.init(smem.empty.index(i), count=8)
    gl.warp_specialize([(consumer, (mem, smem, steps, n_rows, C)), (producer, (mem, smem, tape, steps, C))], [1], [24])
