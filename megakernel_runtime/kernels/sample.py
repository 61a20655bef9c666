"""SAMPLE and ADVANCE: each row's next token from what the LM head's CTAs found, and the slot's move.

Must not know: matrices.
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import gl, gluon
from megakernel_runtime.kernels.matrix import OUT
from megakernel_runtime.kernels.sync import cta

CTAS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def begin_best(C: gl.constexpr):
    """Return (16, T) largest logits so far and their tokens, none yet."""
    T: gl.constexpr = C.rows
    best = gl.full([16, T], float("-inf"), gl.float32, layout=OUT)
    return best, gl.zeros([16, T], gl.int32, layout=OUT)


@gluon.jit
def track_best(best, where, out, r, C: gl.constexpr):
    """Take another row tile's logits into account; of equal ones the lowest token stays."""
    V: gl.constexpr = C.vocab
    better = (out > best) & (r < V)
    return gl.where(better, out, best), gl.where(better, r, where)


@gluon.jit
def publish_best(dst, best, where, C: gl.constexpr):
    """Write this CTA's best logit and token of each row to dst (G, T, 2)."""
    T: gl.constexpr = C.rows
    V: gl.constexpr = C.vocab
    top = gl.max(best, axis=0)
    token = gl.min(gl.where(best == top[None, :], where, V), axis=0)
    at = dst + (cta(C) * T + gl.arange(0, T, layout=gl.SliceLayout(0, OUT))) * 2
    gl.store(at, top.to(gl.int32, bitcast=True))
    gl.store(at + 1, token)


@gluon.jit
def sample(mem, rows, next_rows, t, C: gl.constexpr):
    """Greedy choice for row t if it is the last known position of its slot; the row of the next step follows it."""
    V: gl.constexpr = C.vocab
    T: gl.constexpr = C.rows
    G: gl.constexpr = C.grid
    MAX: gl.constexpr = C.max_len
    slot = gl.load(rows + t * 4)
    pos = gl.load(rows + t * 4 + 1)
    n = gl.load(mem.lens + slot)
    if pos == n - 1:
        c = gl.arange(0, 256, layout=CTAS)
        at = mem.best + (c * T + t) * 2
        value = gl.load(at, mask=c < G, other=-8388608).to(gl.float32, bitcast=True)  # -inf
        token = gl.load(at + 1, mask=c < G, other=V)
        top = gl.max(value, axis=0)
        chosen = gl.min(gl.where(value == top, token, V), axis=0)
        gl.store(mem.tokens + slot * MAX + pos + 1, chosen)
        gl.store(mem.lens + slot, n + 1)
    gl.store(next_rows + t * 4, slot)
    gl.store(next_rows + t * 4 + 1, pos + 1)
    gl.store(next_rows + t * 4 + 2, t)
    gl.store(next_rows + t * 4 + 3, pos + 1)
