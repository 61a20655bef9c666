"""The end of attention: merge the warps' sums of a span, the spans of a row, and the row's own key and value.

A partial result of 8 rows is (top, total, out): the largest base-2 score, the sum of 2^(score - top), and that sum
weighted by values, (8,), (8,) and (8, D), fp32. Must not know: how scores came about.
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon, reinterpret
from megakernel_runtime.kernels.sync import await_tagged, load_tagged, store_pairs, store_tagged

BATCH = gl.constexpr(2)  # spans whose partial results are awaited together
# warps side by side, a row a warp, two neighbouring columns a thread
WARPS = gl.constexpr(gl.BlockedLayout([8, 1, 2], [1, 1, 32], [1, 8, 1], [2, 1, 0]))
LO = gl.constexpr(gl.SliceLayout(0, WARPS))
ROW = gl.constexpr(gl.SliceLayout(1, LO))


@gluon.jit
def merge_warps(smem, top, total, acc, C: gl.constexpr):
    """Merge (8 warps, 16 rows) sums of a span; rows 8 .. 15 are padding."""
    D: gl.constexpr = C.head_dim
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    acc_low, _ = gl.split(gl.permute(gl.reshape(acc, [8, 2, 8, D]), (0, 2, 3, 1)))
    top_low, _top = gl.split(gl.permute(gl.reshape(top, [8, 2, 8]), (0, 2, 1)))
    total_low, _total = gl.split(gl.permute(gl.reshape(total, [8, 2, 8]), (0, 2, 1)))
    stage = reinterpret(smem.v_stage, gl.float32, [8, 8, D], PLAIN)
    stage.store(acc_low)
    smem.tops.index(0).store(top_low)
    smem.tops.index(1).store(total_low)
    barrier()
    tops = smem.tops.index(0).load(gl.SliceLayout(2, WARPS))
    best = gl.max(tops, axis=0)
    weight = gl.exp2(tops - best[None, :])
    norm = gl.sum(smem.tops.index(1).load(gl.SliceLayout(2, WARPS)) * weight, axis=0)
    out = gl.sum(stage.load(WARPS) * weight[:, :, None], axis=0)
    return gl.convert_layout(best, ROW), gl.convert_layout(norm, ROW), out


@gluon.jit
def absorb(best, norm, out, top, total, more):
    """Merge two partial results of the same rows."""
    new = gl.maximum(best, top)
    keep = gl.exp2(best - new)
    take = gl.exp2(top - new)
    return new, norm * keep + total * take, out * keep[:, None] + more * take[:, None]


@gluon.jit
def absorb_own(smem, best, norm, out, C: gl.constexpr):
    """Merge the row's own key and value, which lie beside the queries."""
    D: gl.constexpr = C.head_dim
    GROUP: gl.constexpr = C.group
    q = smem.q_plain.slice(0, 8, 0).load(LO).to(gl.float32)
    key = smem.q_plain.slice(GROUP, 1, 0).load(LO).to(gl.float32)
    value = smem.q_plain.slice(GROUP + 1, 1, 0).load(LO).to(gl.float32)
    score = gl.sum(q * key, axis=1) * (1.4426950408889634 / D**0.5)
    return absorb(best, norm, out, score, score * 0.0 + 1.0, value + q * 0.0)


@gluon.jit
def store_partial(partials, u, best, norm, out, mark, C: gl.constexpr):
    """Publish a span's partial result, marked with the step and layer that it is of."""
    D: gl.constexpr = C.head_dim
    GROUP: gl.constexpr = C.group
    m = gl.arange(0, 8, layout=ROW)
    i = gl.arange(0, D, layout=gl.SliceLayout(0, LO))[None, :]
    base = partials + u * (8 * (D + 2))
    store_tagged(base + (m[:, None] * D + i), out, mark, ((m < GROUP)[:, None] & (i >= 0)).to(gl.int32))
    store_tagged(base + 8 * D + m, best, mark, (m < GROUP).to(gl.int32))
    store_tagged(base + 8 * D + 8 + m, norm, mark, (m < GROUP).to(gl.int32))


@gluon.jit
def absorb_spans(mem, u, n_rows, count, mark, tag, C: gl.constexpr):
    """Merge the partial results of `count` spans of unit u's row and key head, in their order."""
    D: gl.constexpr = C.head_dim
    GROUP: gl.constexpr = C.group
    HEADS: gl.constexpr = C.n_kv_heads
    m = gl.minimum(gl.arange(0, 8, layout=ROW), GROUP - 1)
    i = gl.arange(0, D, layout=gl.SliceLayout(0, LO))[None, :]
    best = gl.full([8], -1.0e30, gl.float32, layout=ROW)
    norm = gl.zeros([8], gl.float32, layout=ROW)
    out = gl.zeros([8, D], gl.float32, layout=LO)
    for j in range(0, count, BATCH):
        pointers = ()
        values = ()
        for b in gl.static_range(BATCH):
            base = mem.partials + (u + gl.minimum(j + b, count - 1) * (n_rows * HEADS)) * (8 * (D + 2))
            here = (base + (m[:, None] * D + i), base + 8 * D + m, base + 8 * D + 8 + m)
            pointers = pointers + (here,)
            values = values + ((load_tagged(here[0]), load_tagged(here[1]), load_tagged(here[2])),)
        for b in gl.static_range(BATCH):
            more = await_tagged(values[b][0], pointers[b][0], mark, mem.abort, tag)
            top = await_tagged(values[b][1], pointers[b][1], mark, mem.abort, tag)
            total = await_tagged(values[b][2], pointers[b][2], mark, mem.abort, tag)
            if j + b < count:
                best, norm, out = absorb(best, norm, out, top, total, more)
    return best, norm, out


@gluon.jit
def write_own(mem, smem, table, layer, head, pos, alive, C: gl.constexpr):
    """Write the row's own key and value to its page, for later steps, if the row is alive."""
    D: gl.constexpr = C.head_dim
    P: gl.constexpr = C.n_pages
    HEADS: gl.constexpr = C.n_kv_heads
    GROUP: gl.constexpr = C.group
    PAGE: gl.constexpr = C.page
    page = gl.load(table + pos // PAGE)
    base = (layer * P + page).to(gl.int64) * (2 * HEADS * PAGE * D) + (head * PAGE + pos % PAGE) * D
    i = gl.arange(0, D, layout=gl.SliceLayout(0, LO))[None, :]
    on = (i >= 0) & (alive != 0)
    gl.store(mem.kv + base + i, smem.q_plain.slice(GROUP, 1, 0).load(LO), mask=on)
    gl.store(mem.kv + base + HEADS * PAGE * D + i, smem.q_plain.slice(GROUP + 1, 1, 0).load(LO), mask=on)


@gluon.jit
def write_result(acts, delta, layer, t, head, out, C: gl.constexpr):
    """Write the group's outputs (8, D) of row t, as bf16."""
    T: gl.constexpr = C.rows
    D: gl.constexpr = C.head_dim
    NQ: gl.constexpr = C.q
    GROUP: gl.constexpr = C.group
    AT: gl.constexpr = C.at_attn
    m = gl.arange(0, 8, layout=ROW)[:, None]
    i = gl.arange(0, D, layout=gl.SliceLayout(0, LO))[None, :]
    pointer = acts + AT + (layer * T + t) * NQ + (head * GROUP + m) * D + i
    store_pairs(pointer, pointer + delta, out, gl.where((m < GROUP) & (i >= 0), 256, 0))


@gluon.jit
def clear_result(acts, delta, layer, t, head, C: gl.constexpr):
    """Empty the words of the other step parity where `write_result` puts a row's outputs of a group."""
    T: gl.constexpr = C.rows
    D: gl.constexpr = C.head_dim
    NQ: gl.constexpr = C.q
    GROUP: gl.constexpr = C.group
    AT: gl.constexpr = C.at_attn
    i = gl.arange(0, 512, layout=gl.BlockedLayout([1], [32], [8], [0]))
    words = (acts + delta + AT + (layer * T + t) * NQ + head * GROUP * D).to(gl.pointer_type(gl.int32))
    gl.store(words + i, gl.full([512], -1, gl.int32, layout=i.type.layout), mask=i < GROUP * D // 2)
