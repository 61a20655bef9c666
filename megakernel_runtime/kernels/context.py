"""What attention reads: raw queries, keys and values of this step, keys and values of pages. Must not know: softmax."""

from __future__ import annotations

from megakernel_runtime.kernels.clocks import account_since, ticks
from megakernel_runtime.kernels.compat import barrier, gl, gluon
from megakernel_runtime.kernels.sync import await_halves, cta, prefetch_line

TILE = gl.constexpr(128)  # tokens of a context tile


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
def stage_row(stage, row, head, norms, cos, sin, pos, waited, abort, tag, C: gl.constexpr):
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
    LH: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HALF // 8), HALF // 8], [8, 1], [1, 0])
    m = gl.arange(0, 16, layout=gl.SliceLayout(1, LH))[:, None]
    d = gl.arange(0, HALF, layout=gl.SliceLayout(0, LH))[None, :]
    line = gl.where(m < GROUP, (head * GROUP + m) * D, NQ + head * D + (m - GROUP) * NKV)
    c = gl.load(cos + pos * HALF + d)
    s = gl.load(sin + pos * HALF + d)
    active = gl.where((m < GROUP + 2) & (d >= 0), 3, 0)
    begun = ticks(tag)
    lo, hi = await_halves(row + line + (d & -8), active, abort, tag, D)
    account_since(waited, begun, C)
    x = lo.to(gl.float32)
    y = hi.to(gl.float32)
    if QK_NORM:
        scale = gl.rsqrt((gl.sum(x * x, axis=1) + gl.sum(y * y, axis=1)) * (1.0 / D) + EPS)[:, None]
        weight = norms + gl.where(m < GROUP, 0, D) + d
        is_value = m > GROUP
        x = gl.where(is_value, x, x * scale * gl.load(weight).to(gl.float32))
        y = gl.where(is_value, y, y * scale * gl.load(weight + HALF).to(gl.float32))
    turned = m <= GROUP
    stage.slice(0, HALF, 1).store(gl.where(turned, x * c - y * s, x).to(gl.bfloat16))
    stage.slice(HALF, HALF, 1).store(gl.where(turned, y * c + x * s, y).to(gl.bfloat16))


@gluon.jit
def load_pages(kv, table, position, end, lo, layer, which, head, d, C: gl.constexpr):
    """Keys (which 0) or values (1) of earlier steps at `position`, (8, TOK, D); zero outside lo .. end - 1."""
    D: gl.constexpr = C.head_dim
    P: gl.constexpr = C.n_pages
    HEADS: gl.constexpr = C.n_kv_heads
    PAGE: gl.constexpr = C.page
    old = (position >= lo) & (position < end)
    page = gl.load(table + position // PAGE, mask=old, other=0)
    base = ((layer * P + page).to(gl.int64) * 2 + which) * (HEADS * PAGE * D)
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
def patch_keys(
    x, smem, fresh, new, start, end, position, d, head, norms, cos, sin, waited, abort, tag, C: gl.constexpr
):
    """Put the keys of this step's earlier rows of the sequence, positions new .., into x, the tile (8, TOK, D)."""
    W: gl.constexpr = C.qkv
    GROUP: gl.constexpr = C.group
    LX: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    while (new < end) & (new < start + TILE):
        stage_row(smem.f_stage, fresh + new * W, head, norms, cos, sin, new, waited, abort, tag, C)
        barrier()
        here = (position == new)[:, :, None] & (d >= 0)[None, None, :]
        x = gl.where(here, gl.expand_dims(smem.f_stage.slice(GROUP, 1, 0).load(LX), 0), x)
        new += 1
        barrier()
    return x


@gluon.jit
def patch_values(x, fresh, new, start, end, position, d, head, C: gl.constexpr):
    """Put the values of the same rows into x. `patch_keys` has awaited them, so that they can be read at once."""
    W: gl.constexpr = C.qkv
    D: gl.constexpr = C.head_dim
    AT: gl.constexpr = C.q + C.kv
    while (new < end) & (new < start + TILE):
        here = (position == new)[:, :, None] & (d >= 0)[None, None, :]
        value = gl.load(fresh + new * W + AT + head * D + d, volatile=True)
        x = gl.where(here, value[None, None, :], x)
        new += 1
    return x
