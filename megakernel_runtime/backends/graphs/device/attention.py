"""Attention over KV pages: single rows by spans of their context, prefill chunks by blocks of rows.

A row's context is cut into spans by its length alone, whatever else runs, and spans are merged in their order: the
result of a row does not depend on its neighbours. Must not know: how queries came about.

Sources: Dao et al., "FlashAttention" (online softmax); Dao et al., "Flash-Decoding" (splitting over the context).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megakernel_runtime.backends.graphs.device.slot import ROW_WORDS

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # below every score, and finite: differences of it stay defined


@triton.jit
def span_layout(position, WINDOW: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, TOKENS: tl.constexpr):
    """How the context of a row at `position` is cut: first token, tokens of a span, number of spans (at -1: none)."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    visible = position + 1 - first
    wanted = tl.minimum(tl.maximum((visible + LEAST - 1) // LEAST, 1), MOST)
    span = (visible + wanted - 1) // wanted
    span = tl.maximum((span + TOKENS - 1) // TOKENS * TOKENS, TOKENS)
    return first, span, (visible + span - 1) // span


@triton.jit(do_not_specialize=["n_rows"])
def plan_spans_kernel(
    rows,
    positions,
    units,  # out: row * MOST + span, for all spans of all rows
    n_units,  # out (1,)
    n_rows,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the spans of the first n_rows rows, once a step, for all layers. One program."""
    r = tl.arange(0, BLOCK)
    position = tl.load(positions + r, mask=r < n_rows, other=-1)
    single = tl.load(rows + r * ROW_WORDS + 3, mask=r < n_rows, other=0) != 0
    _, _, n = span_layout(position, WINDOW, LEAST, MOST, TOKENS)
    n = tl.where(single & (position >= 0), n, 0)
    start = tl.cumsum(n, 0) - n
    tl.store(n_units, tl.sum(n, 0))
    s = tl.arange(0, MOST)[None, :]
    tl.store(units + start[:, None] + s, r[:, None] * MOST + s, mask=s < n[:, None])


@triton.jit
def attend(
    q,  # (M, D_BLOCK)
    position,  # (M,)
    cache,
    table,  # pages of this slot
    head,
    first,
    last,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax(q k^T) v over tokens first .. last - 1: values (M, D_BLOCK), largest score in bits, sum, all f32."""
    M: tl.constexpr = q.shape[0]
    D_BLOCK: tl.constexpr = q.shape[1]
    SCALE: tl.constexpr = LOG2E / D**0.5
    d = tl.arange(0, D_BLOCK)
    values = tl.zeros([M, D_BLOCK], tl.float32)
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < last
        page = tl.load(table + token // PAGE, mask=inside, other=0).to(tl.int64)
        at = (page * (2 * HEADS) + head) * (PAGE * D) + (token % PAGE) * D
        at = at[:, None] + d[None, :]
        on = inside[:, None] & (d < D)[None, :]
        k = tl.load(cache + at, mask=on, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
        seen = inside[None, :] & (token[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(cache + at + HEADS * PAGE * D, mask=on, other=0.0)
        values = tl.dot(p.to(v.dtype), v, values * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return values, top, total


@triton.jit
def merge_spans(
    values,
    tops,
    totals,
    n,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    MOST: tl.constexpr,
    SHARE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """What `n` spans of one row and KV head give together, (GROUP_BLOCK, D_BLOCK). A span is STRIDE heads further."""
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, D_BLOCK)
    s = tl.arange(0, MOST)
    at = s[:, None] * STRIDE + g[None, :]
    on = (s < n)[:, None] & (g < GROUP)[None, :]
    top = tl.load(tops + at, mask=on, other=LOWEST, cache_modifier=".cg")
    largest = tl.max(top, 0)
    sums = tl.load(totals + at, mask=on, other=0.0, cache_modifier=".cg")
    total = tl.sum(tl.exp2(top - largest[None, :]) * sums, 0)
    merged = tl.zeros([GROUP_BLOCK, D_BLOCK], tl.float32)
    for start in range(0, n, SHARE):
        few = start + tl.arange(0, SHARE)
        of_few = few[:, None] * STRIDE + g[None, :]
        in_few = (few < n)[:, None] & (g < GROUP)[None, :]
        factor = tl.exp2(tl.load(tops + of_few, mask=in_few, other=LOWEST, cache_modifier=".cg") - largest[None, :])
        in_few = in_few[:, :, None] & (d < D)[None, None, :]
        at_values = of_few[:, :, None] * D + d[None, None, :]
        part = tl.load(values + at_values, mask=in_few, other=0.0, cache_modifier=".cg")
        merged += tl.sum(part * factor[:, :, None], 0)
    return merged / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def hand_in_span(
    part,  # (GROUP_BLOCK, D_BLOCK), what span `s` of `n` gave, with `top` and `total`
    top,
    total,
    s,
    n,
    mine,  # of the span, in the scratch memory: its first head
    values,
    tops,
    totals,
    arrived,  # of this row and KV head
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Keep what a span gave; whoever hands in the last of a row gets all of them merged: (whether, merged)."""
    GROUP_BLOCK: tl.constexpr = part.shape[0]
    D_BLOCK: tl.constexpr = part.shape[1]
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, D_BLOCK)
    on = (g < GROUP)[:, None] & (d < D)[None, :]
    tl.store(values + (mine + g)[:, None] * D + d[None, :], part, mask=on)
    tl.store(tops + mine + g, top, mask=g < GROUP)
    tl.store(totals + mine + g, total, mask=g < GROUP)
    # The barrier puts all threads' stores before the release of the one thread that counts, the second one its
    # acquire before all threads' loads.
    tl.debug_barrier()
    complete = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == n - 1
    if complete:
        tl.debug_barrier()
        tl.store(arrived, 0)
        first = mine - s * (GROUP * HEADS)
        values += first.to(tl.int64) * D
        part = merge_spans(
            values, tops + first, totals + first, n, GROUP, D, MOST, SHARE, GROUP_BLOCK, D_BLOCK, GROUP * HEADS
        )
    return complete, part


@triton.jit
def attend_spans_kernel(
    qkv,  # (T, WIDTH), queries turned
    cache,
    pages,  # (slots, MAX_PAGES)
    rows,
    positions,
    units,
    n_units,
    values,  # scratch (units, query heads, D) f32
    tops,  # scratch (units, query heads) f32
    totals,
    arrived,  # (rows, KV heads) i32, zero before and after
    out,  # (T, query heads * D)
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARE: tl.constexpr,
    D_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,  # >= 16, for dot
    PRECISION: tl.constexpr,
):
    """All spans of one KV head (program_id(1)), shared out among the programs of the first axis."""
    head = tl.program_id(1)
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, D_BLOCK)
    on = (g < GROUP)[:, None] & (d < D)[None, :]
    in_row = (head * GROUP + g)[:, None] * D + d[None, :]
    for u in range(tl.program_id(0), tl.load(n_units), tl.num_programs(0)):
        unit = tl.load(units + u)
        row, s = unit // MOST, unit % MOST
        position = tl.load(positions + row)
        first, span, n = span_layout(position, WINDOW, LEAST, MOST, TOKENS)
        first += s * span
        last = tl.minimum(first + span, position + 1)
        q = tl.load(qkv + row.to(tl.int64) * ((GROUP + 2) * HEADS * D) + in_row, mask=on, other=0.0)
        table = pages + tl.load(rows + row * ROW_WORDS) * MAX_PAGES
        part, top, total = attend(
            q, position + g * 0, cache, table, head, first, last, D, HEADS, PAGE, WINDOW, TOKENS, PRECISION
        )
        complete = n == 1
        if complete:
            part = part / total[:, None]
        else:
            mine = (u * HEADS + head) * GROUP
            counter = arrived + row * HEADS + head
            complete, part = hand_in_span(
                part, top, total, s, n, mine, values, tops, totals, counter, D, GROUP, HEADS, MOST, SHARE
            )
        if complete:
            tl.store(out + row.to(tl.int64) * (GROUP * HEADS * D) + in_row, part.to(out.dtype.element_ty), mask=on)


@triton.jit
def attend_blocks_kernel(
    qkv,
    cache,
    pages,
    blocks,  # (n, 4): first row, rows (0: none), slot, position of the first row
    out,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of neighbour rows of a chunk, one query head. Their own keys and values lie in the pages already."""
    block = blocks + tl.program_id(0) * 4
    n = tl.load(block + 1)
    if n > 0:
        row = tl.load(block)
        start = tl.load(block + 3)
        q_head = tl.program_id(1)
        r = tl.arange(0, ROWS)
        d = tl.arange(0, D_BLOCK)
        on = (r < n)[:, None] & (d < D)[None, :]
        at = (row + r).to(tl.int64)
        q = tl.load(qkv + at[:, None] * ((GROUP + 2) * HEADS * D) + (q_head * D + d)[None, :], mask=on, other=0.0)
        table = pages + tl.load(block + 2) * MAX_PAGES
        position = tl.where(r < n, start + r, -1)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(start - WINDOW + 1, 0)
        head = q_head // GROUP
        values, _, total = attend(
            q, position, cache, table, head, first, start + n, D, HEADS, PAGE, WINDOW, TOKENS, PRECISION
        )
        values = values / tl.where(total > 0.0, total, 1.0)[:, None]
        to = out + at[:, None] * (GROUP * HEADS * D) + (q_head * D + d)[None, :]
        tl.store(to, values.to(out.dtype.element_ty), mask=on)
