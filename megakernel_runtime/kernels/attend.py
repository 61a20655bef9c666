"""ATTEND: QK-norm, rotary embedding, KV page write and softmax(q k^T) v, in units of one row, one key head, one span.

Keys and values of earlier steps come from pages; those of this step's rows of the same sequence come raw from QKV's
output, so that no phase stands between QKV and attention. A unit writes its own row's key and value to the page. Where
a row's context is split over spans, the first span's CTA awaits the others' partial results and merges them in order.
Pages: (layer, page, key or value, key head, token, head_dim) bf16. Must not know: matrices.
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon, mma_v2
from megakernel_runtime.kernels.matrix import MMA
from megakernel_runtime.kernels.merge import finish
from megakernel_runtime.kernels.sync import await_word

A2 = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2))
B2 = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2))
NEG = gl.constexpr(-1.0e30)
PAGE = gl.constexpr(32)
TOK = gl.constexpr(16)  # tokens of a warp's part of a context tile
TILE = gl.constexpr(128)  # tokens of a context tile


@gluon.jit
def stage_heads(stage, smem, row, head, norms, cos, sin, pos, abort, tag, C: gl.constexpr):
    """Await one row's raw queries of a group, key and value; leave them rotated in `stage`, (16, D) bf16.

    Lines 0 .. group - 1 are the queries, line `group` the key, `group` + 1 the value (as it was), the rest zero.
    QK-norm first where the model has it; rotary pairs are (i, i + D/2), Hugging Face's rotate-half convention, in fp32.
    """
    D: gl.constexpr = C.head_dim
    HALF: gl.constexpr = D // 2
    NQ: gl.constexpr = C.q
    NKV: gl.constexpr = C.kv
    GROUP: gl.constexpr = C.group
    EPS: gl.constexpr = C.eps
    QK_NORM: gl.constexpr = C.qk_norm
    LW: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [8, 1], [1, 0])
    LH: gl.constexpr = gl.BlockedLayout([1, HALF // 16], [2, 16], [8, 1], [1, 0])
    m = gl.arange(0, 16, layout=gl.SliceLayout(1, LW))[:, None]
    i = gl.arange(0, D, layout=gl.SliceLayout(0, LW))[None, :] & -8
    line = gl.where(m < GROUP, (head * GROUP + m) * D, NQ + head * D + (m - GROUP) * NKV)
    lh = gl.arange(0, 16, layout=gl.SliceLayout(1, LH))[:, None]
    d = gl.arange(0, HALF, layout=gl.SliceLayout(0, LH))[None, :]
    c = gl.load(cos + pos * HALF + d)
    s = gl.load(sin + pos * HALF + d)
    raw = await_word(row + line + i, ((m < GROUP + 2) & (i >= 0)).to(gl.int32), abort, tag)
    barrier()  # the stage's last readers are done
    smem.raw_stage.store(raw)
    barrier()
    x = smem.raw_stage.slice(0, HALF, 1).load(LH).to(gl.float32)
    y = smem.raw_stage.slice(HALF, HALF, 1).load(LH).to(gl.float32)
    if QK_NORM:
        scale = gl.rsqrt((gl.sum(x * x, axis=1) + gl.sum(y * y, axis=1)) / D + EPS)[:, None]
        weight = norms + gl.where(lh < GROUP, 0, D) + d
        is_value = lh > GROUP
        x = gl.where(is_value, x, x * scale * gl.load(weight).to(gl.float32))
        y = gl.where(is_value, y, y * scale * gl.load(weight + HALF).to(gl.float32))
    turned = lh <= GROUP
    stage.slice(0, HALF, 1).store(gl.where(turned, x * c - y * s, x).to(gl.bfloat16))
    stage.slice(HALF, HALF, 1).store(gl.where(turned, y * c + x * s, y).to(gl.bfloat16))
    barrier()


@gluon.jit
def load_pages(kv, table, position, first_new, lo, layer, which, head, d, C: gl.constexpr):
    """Keys (which 0) or values (1) of earlier steps at `position`, (8, TOK, D); zero where there is none."""
    D: gl.constexpr = C.head_dim
    P: gl.constexpr = C.n_pages
    HEADS: gl.constexpr = C.n_kv_heads
    old = (position >= lo) & (position < first_new)
    page = gl.load(table + position // PAGE, mask=old, other=0)
    base = ((layer * P + page).to(gl.int64) * 2 + which) * (HEADS * PAGE * D)
    pointer = kv + (base + (head * PAGE + position % PAGE) * D)[:, :, None] + d[None, None, :]
    return gl.load(pointer, mask=old[:, :, None] & (d >= 0)[None, None, :], other=0.0, cache_modifier=".cg")


@gluon.jit
def attend(mem, smem, acts, partials, rows, delta, other, layer, n_rows, n_spans, tag, C: gl.constexpr):
    """All of this CTA's units of one layer: at most one if contexts are split, so that no waiting goes in a circle."""
    HEADS: gl.constexpr = C.n_kv_heads
    G: gl.constexpr = C.grid
    u = gl.program_id(0)
    while u < n_rows * HEADS * n_spans:
        unit(mem, smem, acts, partials, rows, delta, other, layer, u, n_rows * HEADS, n_spans, tag, C)
        u += G


@gluon.jit
def unit(mem, smem, acts, partials, rows, delta, other, layer, u, n_units, n_spans, tag, C: gl.constexpr):
    """Row t, one key head, one span of the context: the group's attention over it."""
    T: gl.constexpr = C.rows
    D: gl.constexpr = C.head_dim
    W: gl.constexpr = C.qkv
    P: gl.constexpr = C.n_pages
    HEADS: gl.constexpr = C.n_kv_heads
    MAXP: gl.constexpr = C.max_pages
    WINDOW: gl.constexpr = C.window
    GROUP: gl.constexpr = C.group
    WIDE: gl.constexpr = C.head_dim > 64
    AT: gl.constexpr = C.at_qkv
    LK: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // (D // 8), D // 8], [8, 1, 1], [2, 1, 0])
    LP: gl.constexpr = gl.SliceLayout(2, LK)
    LD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LK))
    kv, cos, sin, abort, stages = mem.kv, mem.cos, mem.sin, mem.abort, smem.stages
    span = u // n_units
    t = u % n_units // HEADS
    head = u % HEADS
    slot = gl.load(rows + t * 4)
    pos = gl.load(rows + t * 4 + 1)
    row0 = gl.load(rows + t * 4 + 2)
    first_new = gl.load(rows + t * 4 + 3)
    raw = acts + AT + layer * (T * W)
    table = mem.pages + slot * MAXP
    lo = 0
    if WINDOW > 0:
        lo = gl.maximum(pos - WINDOW + 1, 0)
    tiles = pos // TILE - lo // TILE + 1
    per_span = gl.maximum((tiles + n_spans - 1) // n_spans, 2)
    start = (lo // TILE + span * per_span) * TILE
    end = gl.minimum(start + per_span * TILE - 1, pos)  # the last position of the span
    n_merge = (tiles + per_span - 1) // per_span
    if span < n_merge:
        d = gl.arange(0, D, layout=LD)
        tile_pos = (
            gl.arange(0, 8, layout=gl.SliceLayout(1, LP))[:, None] * TOK
            + gl.arange(0, TOK, layout=gl.SliceLayout(0, LP))[None, :]
        )
        norms = mem.qk_norms + layer * (2 * D)
        # what waits for nobody first; wide heads leave no registers to load values, or the next tile, so early
        k = load_pages(kv, table, start + tile_pos, first_new, lo, layer, 0, head, d, C)
        if not WIDE:
            v = load_pages(kv, table, start + tile_pos, first_new, lo, layer, 1, head, d, C)
        stage_heads(smem.q_stage, smem, raw + t * W, head, norms, cos, sin, pos, abort, tag, C)
        if end == pos:
            page = gl.load(table + pos // PAGE)
            base = (layer * P + page).to(gl.int64) * (2 * HEADS * PAGE * D) + (head * PAGE + pos % PAGE) * D
            own_at = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, LK)))[None, :]
            gl.store(kv + base + own_at, smem.q_stage.slice(GROUP, 1, 0).load(gl.SliceLayout(0, LK)))
            value_at = base + HEADS * PAGE * D + own_at
            gl.store(kv + value_at, smem.q_stage.slice(GROUP + 1, 1, 0).load(gl.SliceLayout(0, LK)))
        s_pos = (
            gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None] * TOK
            + gl.arange(0, TOK, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
        )
        top = gl.full([8, 16], NEG, gl.float32, layout=gl.SliceLayout(2, MMA))
        total = gl.zeros([8, 16], gl.float32, layout=gl.SliceLayout(2, MMA))
        acc = gl.zeros([8, 16, D], gl.float32, layout=MMA)
        fresh = raw + (row0 - first_new) * W
        while start <= end:
            position = start + tile_pos
            new = gl.maximum(start, gl.maximum(first_new, lo))
            k = patch(k, 0, smem, fresh, new, start, pos, position, d, head, norms, cos, sin, abort, tag, C)
            barrier()
            stages.index(0).store(k)
            if WIDE:
                v = load_pages(kv, table, position, first_new, lo, layer, 1, head, d, C)
            v = patch(v, 1, smem, fresh, new, start, pos, position, d, head, norms, cos, sin, abort, tag, C)
            stages.index(1).store(v)
            barrier()
            old_end = gl.minimum(first_new, end + 1)
            if not WIDE:
                k = load_pages(kv, table, position + TILE, old_end, lo, layer, 0, head, d, C)
                v = load_pages(kv, table, position + TILE, old_end, lo, layer, 1, head, d, C)
            q = gl.expand_dims(smem.q_stage.load(gl.SliceLayout(0, A2)), 0)
            q, _ = gl.broadcast(q, gl.zeros([8, 16, D], gl.bfloat16, layout=A2))
            scores = gl.zeros([8, 16, TOK], gl.float32, layout=MMA)
            scores = mma_v2(q, stages.index(0).permute((0, 2, 1)).load(B2), scores)
            at = start + s_pos
            seen = (at >= lo) & (at <= pos)
            scores = gl.where(seen, scores * (1.4426950408889634 / D**0.5), NEG)
            new_top = gl.maximum(top, gl.max(scores, axis=2))
            p = gl.where(seen, gl.exp2(scores - new_top[:, :, None]), 0.0)
            shrink = gl.exp2(top - new_top)
            total = total * shrink + gl.sum(p, axis=2)
            acc = mma_v2(gl.convert_layout(p.to(gl.bfloat16), A2), stages.index(1).load(B2), acc * shrink[:, :, None])
            top = new_top
            start += TILE
            if WIDE:
                k = load_pages(kv, table, start + tile_pos, old_end, lo, layer, 0, head, d, C)
        finish(
            stages,
            acts,
            partials,
            delta,
            other,
            layer,
            u,
            n_units,
            span,
            n_merge,
            t,
            head,
            top,
            total,
            acc,
            abort,
            tag,
            C,
        )


@gluon.jit
def patch(
    x,
    which: gl.constexpr,
    smem,
    fresh,
    new,
    start,
    pos,
    position,
    d,
    head,
    norms,
    cos,
    sin,
    abort,
    tag,
    C: gl.constexpr,
):
    """Put this step's keys (which 0) or values (1) of positions new .. pos into x, the tile (8, TOK, D) at `start`.

    The row's own lie in q_stage; those of earlier rows of the same sequence are staged again, as the prompt needs them.
    """
    W: gl.constexpr = C.qkv
    GROUP: gl.constexpr = C.group
    LX: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    while (new < pos) & (new < start + TILE):
        stage_heads(smem.f_stage, smem, fresh + new * W, head, norms, cos, sin, new, abort, tag, C)
        here = (position == new)[:, :, None] & (d >= 0)[None, None, :]
        x = gl.where(here, gl.expand_dims(smem.f_stage.slice(GROUP + which, 1, 0).load(LX), 0), x)
        new += 1
    here = (position == pos)[:, :, None] & (d >= 0)[None, None, :]
    return gl.where(here, gl.expand_dims(smem.q_stage.slice(GROUP + which, 1, 0).load(LX), 0), x)
