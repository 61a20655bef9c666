"""What attention reads: raw queries, keys and values of this step, keys and values of pages. Must not know: softmax.

Keys go from their pages straight to the registers of the MMA, as activations do, with the columns of a head permuted
(resident/tape.py); queries are permuted to match when they are staged. Values take the way through shared memory.
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon
from megakernel_runtime.kernels.matrix import B
from megakernel_runtime.kernels.sync import await_halves, cta, load_keys, prefetch_line


@gluon.jit
def span_count(pos, C: gl.constexpr):
    """How many spans lie before a row at `pos`, and the first; the row itself is in none."""
    SPAN: gl.constexpr = C.span
    WINDOW: gl.constexpr = C.window
    lo = pos * 0
    if WINDOW > 0:
        lo = gl.maximum(pos - WINDOW + 1, 0)
    first = lo // SPAN
    return gl.where(pos > lo, (pos - 1) // SPAN - first + 1, 0), first, lo


@gluon.jit
def permuted(lo, hi, D: gl.constexpr):
    """Both halves of 16 heads, (16, D / 2) each, as (16, D) with each 64 columns in the order of the tape's."""
    if D == 64:
        both = gl.join(gl.reshape(lo, [16, 4, 2, 2, 2]), gl.reshape(hi, [16, 4, 2, 2, 2]))  # thread, mma, half, low
        return gl.reshape(gl.permute(both, (0, 5, 2, 3, 1, 4)), [16, 64])
    else:
        both = gl.join(gl.reshape(lo, [16, 2, 4, 2, 2, 2]), gl.reshape(hi, [16, 2, 4, 2, 2, 2]))
        return gl.reshape(gl.permute(both, (0, 6, 1, 3, 4, 2, 5)), [16, 128])


@gluon.jit
def stage_row(stage, plain, row, head, norms, cos, sin, pos, waits, abort, tag, C: gl.constexpr):
    """Await one row's raw queries of a group, key and value; leave them rotated in `plain` and, permuted, in `stage`,
    both (16, D) bf16.

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
    LH: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HALF // 8), HALF // 8], [8, 1], [1, 0])
    m = gl.arange(0, 16, layout=gl.SliceLayout(1, LH))[:, None]
    d = gl.arange(0, HALF, layout=gl.SliceLayout(0, LH))[None, :]
    line = gl.where(m < GROUP, (head * GROUP + m) * D, NQ + head * D + (m - GROUP) * NKV)
    c = gl.load(cos + pos * HALF + d)
    s = gl.load(sin + pos * HALF + d)
    weight = norms + gl.where(m < GROUP, 0, D) + d
    if QK_NORM:
        weight_lo = gl.load(weight)
        weight_hi = gl.load(weight + HALF)
    active = gl.where((m < GROUP + 2) & (d >= 0), 3, 0)
    lo, hi = await_halves(row + line + (d & -8), active, waits, abort, tag, C)
    x = lo.to(gl.float32)
    y = hi.to(gl.float32)
    if QK_NORM:
        scale = gl.rsqrt((gl.sum(x * x, axis=1) + gl.sum(y * y, axis=1)) * (1.0 / D) + EPS)[:, None]
        is_value = m > GROUP
        x = gl.where(is_value, x, x * scale * weight_lo.to(gl.float32))
        y = gl.where(is_value, y, y * scale * weight_hi.to(gl.float32))
    turned = m <= GROUP
    lo = gl.where(turned, x * c - y * s, x).to(gl.bfloat16)
    hi = gl.where(turned, y * c + x * s, y).to(gl.bfloat16)
    stage.store(permuted(lo, hi, D))
    plain.slice(0, HALF, 1).store(lo)
    plain.slice(HALF, HALF, 1).store(hi)


@gluon.jit
def load_page_keys(kv, table, start, end, lo, layer, head, C: gl.constexpr):
    """Keys of earlier steps at positions start .. as the MMA's operand, (8, D, TOK): warp, column, token of the warp.

    Zero outside lo .. end - 1. Columns beyond 64 come as more operands: returns a tuple of D / 64.
    """
    D: gl.constexpr = C.head_dim
    P: gl.constexpr = C.n_pages
    HEADS: gl.constexpr = C.n_kv_heads
    PAGE: gl.constexpr = C.page
    TOK: gl.constexpr = C.warp_tokens
    w = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))
    n = gl.arange(0, TOK, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))
    position = start + w[:, None, None] * TOK + n[None, None, :]
    old = (position >= lo) & (position < end)
    page = gl.load(table + position // PAGE, mask=old, other=0)
    base = (layer * P + page).to(gl.int64) * (2 * HEADS * PAGE * D) + (head * PAGE + position % PAGE) * D
    pointer = kv + base + ((k & 7) >> 1)[None, :, None] * 8
    on = gl.where(old & (k >= 0)[None, :, None], 1, 0)
    operands = ()
    for part in gl.static_range(D // 64):
        operands = operands + (load_keys(pointer + part * 64, on),)
    return operands


@gluon.jit
def load_page_values(kv, table, position, end, lo, layer, head, d, C: gl.constexpr):
    """Values of earlier steps at `position`, (8, TOK, D); zero outside lo .. end - 1."""
    D: gl.constexpr = C.head_dim
    P: gl.constexpr = C.n_pages
    HEADS: gl.constexpr = C.n_kv_heads
    PAGE: gl.constexpr = C.page
    old = (position >= lo) & (position < end)
    page = gl.load(table + position // PAGE, mask=old, other=0)
    base = ((layer * P + page).to(gl.int64) * 2 + 1) * (HEADS * PAGE * D)
    pointer = kv + (base + (head * PAGE + position % PAGE) * D)[:, :, None] + d[None, None, :]
    return gl.load(pointer, mask=old[:, :, None] & (d >= 0)[None, None, :], other=0.0, cache_modifier=".cg")


@gluon.jit
def prefetch(mem, rows, layer, n_rows, spans, C: gl.constexpr):
    """Bring the pages of this CTA's first unit of `layer` into the L2 cache; their loads will come soon."""
    D: gl.constexpr = C.head_dim
    P: gl.constexpr = C.n_pages
    SPAN: gl.constexpr = C.span
    HEADS: gl.constexpr = C.n_kv_heads
    MAXP: gl.constexpr = C.max_pages
    PAGE: gl.constexpr = C.page
    PAGES_AT: gl.constexpr = C.pages_at
    LINES: gl.constexpr = PAGE * D // 64  # of 128 bytes, of a page's keys of one head
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    u = cta(C)
    if u < n_rows * HEADS * spans:
        head = u % HEADS
        t = u // HEADS % n_rows
        pos = gl.load(rows + t * 8 + 1)
        count, first_span, _lo = span_count(pos, C)
        j = u // (HEADS * n_rows)
        if j < count:
            table = mem.state + PAGES_AT + gl.load(rows + t * 8) * MAXP
            begin = (first_span + j) * SPAN
            n_pages = (gl.minimum(begin + SPAN, pos) - begin + PAGE - 1) // PAGE
            i = gl.arange(0, 256, layout=LINE)
            for at in range(0, n_pages * LINES, 256):
                line = at + i
                page = gl.load(table + begin // PAGE + line // LINES, mask=line < n_pages * LINES, other=0)
                base = ((layer * P + page).to(gl.int64) * 2) * (HEADS * PAGE * D) + head * PAGE * D + line % LINES * 64
                prefetch_line(mem.kv + base)
                prefetch_line(mem.kv + base + HEADS * PAGE * D)


@gluon.jit
def patch_keys(keys, smem, fresh, new, start, end, head, norms, cos, sin, waits, abort, tag, C: gl.constexpr):
    """Put the keys of this step's earlier rows of the sequence, positions new .. end - 1, into the operands `keys`."""
    W: gl.constexpr = C.qkv
    D: gl.constexpr = C.head_dim
    GROUP: gl.constexpr = C.group
    TOK: gl.constexpr = C.warp_tokens
    LINE: gl.constexpr = gl.SliceLayout(2, B)
    w = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))
    n = gl.arange(0, TOK, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))
    position = start + w[:, None, None] * TOK + n[None, None, :]
    while (new < end) & (new < start + 8 * TOK):
        stage_row(smem.f_stage, smem.f_plain, fresh + new * W, head, norms, cos, sin, new, waits, abort, tag, C)
        barrier()
        patched = ()
        for part in gl.static_range(D // 64):
            key = smem.f_stage.slice(GROUP, 1, 0).slice(part * 64, 64, 1).load(LINE)
            patched = patched + (gl.where(position == new, gl.expand_dims(key, 2), keys[part]),)
        keys = patched
        new += 1
        barrier()
    return keys


@gluon.jit
def patch_values(x, fresh, new, start, end, position, d, head, C: gl.constexpr):
    """Put the values of the same rows, which `patch_keys` has awaited, into x, (8, TOK, D)."""
    W: gl.constexpr = C.qkv
    D: gl.constexpr = C.head_dim
    AT: gl.constexpr = C.q + C.kv
    TOK: gl.constexpr = C.warp_tokens
    while (new < end) & (new < start + 8 * TOK):
        here = (position == new)[:, :, None] & (d >= 0)[None, None, :]
        value = gl.load(fresh + new * W + AT + head * D + d, volatile=True)
        x = gl.where(here, value[None, None, :], x)
        new += 1
    return x
