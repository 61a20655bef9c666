"""The end of an attention unit: merge the warps' sums, then the spans' partial results.

Must not know: how they came about.
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon, reinterpret
from megakernel_runtime.kernels.sync import await_single, store_pairs, store_single


@gluon.jit
def finish(
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
    C: gl.constexpr,
):
    """Merge the warps' sums in warp order; write the group's output, or the span's partial result, or merge the spans'.

    A partial result is (8, D) normalised outputs, then 8 base-2 logarithms of the sums of exponentials, fp32.
    """
    T: gl.constexpr = C.rows
    D: gl.constexpr = C.head_dim
    GROUP: gl.constexpr = C.group
    NQ: gl.constexpr = C.q
    AT: gl.constexpr = C.at_attn
    UNIT: gl.constexpr = 8 * (C.head_dim + 1)
    UNITS: gl.constexpr = C.max_units
    LS: gl.constexpr = gl.BlockedLayout([8, 1, 2], [1, 1, 32], [1, 8, 1], [2, 1, 0])
    LO: gl.constexpr = gl.SliceLayout(0, LS)
    LM: gl.constexpr = gl.SliceLayout(1, LO)
    best = gl.max(top, axis=0)  # (16,)
    weight = gl.exp2(top - best[None, :])
    total = gl.sum(total * weight, axis=0)
    acc = acc * (weight / total[None, :])[:, :, None]
    low, _ = gl.split(gl.permute(gl.reshape(acc, [8, 2, 8, D]), (0, 2, 3, 1)))  # rows 8..15 are padding
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    stage = reinterpret(stages, gl.float32, [8, 8, D], SUMS)
    barrier()
    stage.store(low)
    barrier()
    out = gl.sum(stage.load(LS), axis=0)
    m = gl.arange(0, 8, layout=LM)
    i = gl.arange(0, D, layout=gl.SliceLayout(0, LO))[None, :]
    if n_merge > 1:
        lse, padding = gl.split(gl.permute(gl.reshape(best + gl.log2(total), [2, 8]), (1, 0)))
        lse = gl.convert_layout(lse, LM)
        base = partials + (layer * UNITS + u) * UNIT
        at = base + (m[:, None] * D + i)
        if span > 0:
            store_single(at, at + other, out, ((m < GROUP)[:, None] & (i >= 0)).to(gl.int32))
            store_single(base + 8 * D + m, base + 8 * D + m + other, lse, (m < GROUP).to(gl.int32))
        else:
            norm = gl.full([8], 1.0, gl.float32, layout=LM)
            for s in range(1, n_merge):
                m_safe = gl.minimum(m, GROUP - 1)
                from_lse = await_single(base + s * n_units * UNIT + 8 * D + m_safe, abort, tag)
                from_out = await_single(base + s * n_units * UNIT + (m_safe[:, None] * D + i), abort, tag)
                new = gl.maximum(lse, from_lse)
                keep = gl.exp2(lse - new)
                take = gl.exp2(from_lse - new)
                norm = norm * keep + take
                out = out * keep[:, None] + from_out * take[:, None]
                lse = new
            out = out / norm[:, None]
    if span == 0:
        pointer = acts + AT + layer * (T * NQ) + t * NQ + (head * GROUP + m[:, None]) * D + i
        store_pairs(pointer, pointer + delta, out, gl.where((m < GROUP)[:, None] & (i >= 0), 256, 0))
