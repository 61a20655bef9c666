"""ATTEND: QK-norm, rotary embedding, KV page write and softmax(q k^T) v, in units of one row, one key head, one span.

Spans are runs of `KernelShape.span` positions, wherever a context begins and whoever computes them, and are merged in
their order, so that a row's result depends neither on the batch nor on the number of SMs. Keys and values of earlier
steps come from pages; those of this step's earlier rows of the same sequence come raw from QKV's output and take
their place in the tile, so that no phase stands between QKV and attention; a row's own key and value come last.
Pages: (layer, page, key or value, key head, token, head_dim) bf16. Must not know: matrices.
"""

from __future__ import annotations

from megakernel_runtime.kernels import words as w
from megakernel_runtime.kernels.clocks import accounts_of
from megakernel_runtime.kernels.compat import barrier, gl, gluon, mma_v2
from megakernel_runtime.kernels.context import (
    load_page_keys,
    load_page_values,
    patch_keys,
    patch_values,
    span_count,
    stage_row,
)
from megakernel_runtime.kernels.matrix import MMA
from megakernel_runtime.kernels.merge import (
    absorb_own,
    absorb_spans,
    clear_result,
    merge_warps,
    store_partial,
    write_own,
    write_result,
)
from megakernel_runtime.kernels.sync import cta

A2 = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2))
B2 = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2))
NEG = gl.constexpr(-1.0e30)
DEPENDENCY = gl.constexpr(w.DEPENDENCY)


@gluon.jit
def attend(mem, smem, acts, rows, delta, layer, n_rows, rows_before, spans, mark, tag, C: gl.constexpr):
    """This CTA's units of one layer; those of rows with several spans leave partial results, which are merged after.

    No unit waits for another's partial result before this CTA's own are written: waiting cannot go in a circle.
    Rows that the step before had and this one has not are emptied for the next step. mark: see `store_partial`.
    """
    HEADS: gl.constexpr = C.n_kv_heads
    G: gl.constexpr = C.grid
    u = cta(C)
    while u < n_rows * HEADS * spans:
        unit(mem, smem, acts, rows, delta, layer, u, n_rows, mark, tag, C)
        u += G
    u = cta(C)
    if spans > 1:
        while u < n_rows * HEADS:
            join(mem, smem, acts, rows, delta, layer, u, n_rows, mark, tag, C)
            u += G
    u = n_rows * HEADS + cta(C)
    while u < rows_before * HEADS:
        clear_result(acts, delta, layer, u // HEADS, u % HEADS, C)
        u += G


@gluon.jit
def tile_positions(start, C: gl.constexpr):
    """Positions (8, TOK) of a context tile's values, and their columns (D,)."""
    D: gl.constexpr = C.head_dim
    TOK: gl.constexpr = C.warp_tokens
    LV: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // (D // 8), D // 8], [8, 1, 1], [2, 1, 0])
    LP: gl.constexpr = gl.SliceLayout(2, LV)
    w = gl.arange(0, 8, layout=gl.SliceLayout(1, LP))[:, None]
    n = gl.arange(0, TOK, layout=gl.SliceLayout(0, LP))[None, :]
    return start + w * TOK + n, gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LV)))


@gluon.jit
def products(smem, keys, C: gl.constexpr):
    """Scores (8, 16, TOK) of the staged queries with a tile's keys, not scaled."""
    D: gl.constexpr = C.head_dim
    TOK: gl.constexpr = C.warp_tokens
    scores = gl.zeros([8, 16, TOK], gl.float32, layout=MMA)
    for part in gl.static_range(D // 64):
        q = gl.expand_dims(smem.q_stage.slice(part * 64, 64, 1).load(gl.SliceLayout(0, A2)), 0)
        q, _ = gl.broadcast(q, gl.zeros([8, 16, 64], gl.bfloat16, layout=A2))
        scores = mma_v2(q, keys[part], scores)
    return scores


@gluon.jit
def tile_scores(
    mem, smem, raw, fresh, table, new, start, end, lo, layer, head, t, pos, is_first, norms, waits, tag, C: gl.constexpr
):
    """Scores of a tile whose keys are in pages up to position `new`, and of this step from there on; leaves its values
    in `v_stage`. Two copies: keys and values that meet again after a branch would be taken apart and packed anew.
    """
    if C.fresh:
        if new < gl.minimum(end, start + 8 * C.warp_tokens):
            scores = fresh_scores(
                mem, smem, raw, fresh, table, new, start, end, lo, layer, head, t, pos, norms, waits, tag, C
            )
        else:
            scores = old_scores(
                mem, smem, raw, table, start, end, lo, layer, head, t, pos, is_first, norms, waits, tag, C
            )
    else:
        scores = old_scores(mem, smem, raw, table, start, end, lo, layer, head, t, pos, is_first, norms, waits, tag, C)
    return scores


@gluon.jit
def old_scores(
    mem, smem, raw, table, start, end, lo, layer, head, t, pos, is_first, norms, waits, tag, C: gl.constexpr
):
    """Scores of a tile of which all keys are in pages; leaves its values in `v_stage`. The first tile of a unit awaits
    the queries, after its own loads.
    """
    W: gl.constexpr = C.qkv
    position, d = tile_positions(start, C)
    v = load_page_values(mem.kv, table, position, end, lo, layer, head, d, C)
    keys = load_page_keys(mem.kv, table, start, end, lo, layer, head, C)
    smem.v_stage.store(v)
    if is_first:
        row = raw + t * W
        stage_row(smem.q_stage, smem.q_plain, row, head, norms, mem.cos, mem.sin, pos, waits, mem.abort, tag, C)
    barrier()
    return products(smem, keys, C)


@gluon.jit
def fresh_scores(
    mem, smem, raw, fresh, table, new, start, end, lo, layer, head, t, pos, norms, waits, tag, C: gl.constexpr
):
    """The same of a tile with keys of this step, from position `new` on."""
    W: gl.constexpr = C.qkv
    position, d = tile_positions(start, C)
    v = load_page_values(mem.kv, table, position, new, lo, layer, head, d, C)
    keys = load_page_keys(mem.kv, table, start, new, lo, layer, head, C)
    keys = patch_keys(keys, smem, fresh, new, start, end, head, norms, mem.cos, mem.sin, waits, mem.abort, tag, C)
    v = patch_values(v, fresh, new, start, end, position, d, head, C)
    smem.v_stage.store(v)
    row = raw + t * W
    stage_row(smem.q_stage, smem.q_plain, row, head, norms, mem.cos, mem.sin, pos, waits, mem.abort, tag, C)
    barrier()
    return products(smem, keys, C)


@gluon.jit
def unit(mem, smem, acts, rows, delta, layer, u, n_rows, mark, tag, C: gl.constexpr):
    """Row t, one key head, one span: the group's attention over it, to a partial result or, if alone, to the end.

    What waits for nobody comes first: pages are loaded, and values staged, before the queries are awaited.
    """
    T: gl.constexpr = C.rows
    D: gl.constexpr = C.head_dim
    W: gl.constexpr = C.qkv
    SPAN: gl.constexpr = C.span
    HEADS: gl.constexpr = C.n_kv_heads
    MAXP: gl.constexpr = C.max_pages
    AT: gl.constexpr = C.at_qkv
    PAGES_AT: gl.constexpr = C.pages_at
    TOK: gl.constexpr = C.warp_tokens
    TILE: gl.constexpr = 8 * TOK
    waits = accounts_of(mem, cta(C)) + DEPENDENCY
    head = u % HEADS
    t = u // HEADS % n_rows
    j = u // (HEADS * n_rows)
    slot = gl.load(rows + t * 8)
    pos = gl.load(rows + t * 8 + 1)
    row0 = gl.load(rows + t * 8 + 2)
    first_new = gl.load(rows + t * 8 + 3)
    alive = gl.load(rows + t * 8 + 6)
    count, first_span, lo = span_count(pos, C)
    if j < gl.maximum(count, 1):
        raw = acts + AT + layer * (T * W)
        table = mem.state + PAGES_AT + slot * MAXP
        norms = mem.qk_norms + layer * (2 * D)
        fresh = raw + (row0 - first_new) * W
        begin = (first_span + j) * SPAN
        start = gl.maximum(begin, lo - lo % TILE)
        end = gl.minimum(begin + SPAN, pos)
        s_pos = (
            gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None] * TOK
            + gl.arange(0, TOK, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
        )
        top = gl.full([8, 16], NEG, gl.float32, layout=gl.SliceLayout(2, MMA))
        total = gl.zeros([8, 16], gl.float32, layout=gl.SliceLayout(2, MMA))
        acc = gl.zeros([8, 16, D], gl.float32, layout=MMA)
        first = start
        while (start < end) | (start == first):  # a sequence's first token has no context, but queries
            new = gl.maximum(start, gl.maximum(first_new, lo))
            scores = tile_scores(
                mem,
                smem,
                raw,
                fresh,
                table,
                new,
                start,
                end,
                lo,
                layer,
                head,
                t,
                pos,
                start == first,
                norms,
                waits,
                tag,
                C,
            )
            at = start + s_pos
            seen = (at >= lo) & (at < end)
            scores = gl.where(seen, scores * (1.4426950408889634 / D**0.5), NEG)
            new_top = gl.maximum(top, gl.max(scores, axis=2))
            p = gl.where(seen, gl.exp2(scores - new_top[:, :, None]), 0.0)
            shrink = gl.exp2(top - new_top)
            total = total * shrink + gl.sum(p, axis=2)
            acc = mma_v2(gl.convert_layout(p.to(gl.bfloat16), A2), smem.v_stage.load(B2), acc * shrink[:, :, None])
            top = new_top
            start += TILE
            barrier()  # the stage's readers are done
        best, norm, out = merge_warps(smem, top, total, acc, C)
        if count > 1:
            store_partial(mem.partials, u, best, norm, out, mark, C)
        else:
            best, norm, out = absorb_own(smem, best, norm, out, C)
            write_result(acts, delta, layer, t, head, out / norm[:, None], C)
            write_own(mem, smem, table, layer, head, pos, alive, C)
        barrier()  # the next unit may overwrite what this one read


@gluon.jit
def join(mem, smem, acts, rows, delta, layer, u, n_rows, mark, tag, C: gl.constexpr):
    """Merge the partial results of a row and key head with several spans, then its own key and value."""
    T: gl.constexpr = C.rows
    D: gl.constexpr = C.head_dim
    W: gl.constexpr = C.qkv
    HEADS: gl.constexpr = C.n_kv_heads
    MAXP: gl.constexpr = C.max_pages
    AT: gl.constexpr = C.at_qkv
    PAGES_AT: gl.constexpr = C.pages_at
    waits = accounts_of(mem, cta(C)) + DEPENDENCY
    t = u // HEADS
    head = u % HEADS
    slot = gl.load(rows + t * 8)
    pos = gl.load(rows + t * 8 + 1)
    alive = gl.load(rows + t * 8 + 6)
    count, _first, _lo = span_count(pos, C)
    if count > 1:
        raw = acts + AT + (layer * T + t) * W
        norms = mem.qk_norms + layer * (2 * D)
        stage_row(smem.q_stage, smem.q_plain, raw, head, norms, mem.cos, mem.sin, pos, waits, mem.abort, tag, C)
        barrier()
        best, norm, out = absorb_spans(mem, u, n_rows, count, mark, tag, C)
        best, norm, out = absorb_own(smem, best, norm, out, C)
        write_result(acts, delta, layer, t, head, out / norm[:, None], C)
        write_own(mem, smem, mem.state + PAGES_AT + slot * MAXP, layer, head, pos, alive, C)
        barrier()
