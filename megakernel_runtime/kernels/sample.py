"""SAMPLE and ADVANCE: each row's next token from what the LM head's CTAs found, and the slot's move.

Must not know: matrices.
"""

from __future__ import annotations

from megakernel_runtime.device_state.fields import FIELD_WORDS, Field, Outcome
from megakernel_runtime.kernels import words as w
from megakernel_runtime.kernels.compat import barrier, gl, gluon
from megakernel_runtime.kernels.matrix import OUT
from megakernel_runtime.kernels.sync import cta

SLOT_WORDS = gl.constexpr(FIELD_WORDS)
GENERATED = gl.constexpr(int(Field.GENERATED))
LIMIT = gl.constexpr(int(Field.LIMIT))
MIN_TOKENS = gl.constexpr(int(Field.MIN_TOKENS))
POSITION = gl.constexpr(int(Field.POSITION))
TOKEN = gl.constexpr(int(Field.TOKEN))
LIVE = gl.constexpr(int(Field.LIVE))
RESULTS = gl.constexpr(w.RESULTS)
TOKEN_WORDS = gl.constexpr(w.TOKEN_WORDS)
OUT_SLOT = gl.constexpr(w.OUT_SLOT)
OUT_TOKEN = gl.constexpr(w.OUT_TOKEN)
OUT_OUTCOME = gl.constexpr(w.OUT_OUTCOME)
RUNS = gl.constexpr(int(Outcome.RUNS))
STOP = gl.constexpr(int(Outcome.STOP))
LENGTH = gl.constexpr(int(Outcome.LENGTH))
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
def sample(mem, rows, s, t, C: gl.constexpr):
    """Choose row t's next token if the row is its slot's last known one; move the slot on and tell the host."""
    V: gl.constexpr = C.vocab
    T: gl.constexpr = C.rows
    G: gl.constexpr = C.grid
    slot = gl.load(rows + t * 8)
    out = mem.results + (s % RESULTS * T + t) * TOKEN_WORDS
    if gl.load(rows + t * 8 + 5) != 0:
        c = gl.arange(0, 256, layout=CTAS)
        at = mem.best + (c * T + t) * 2
        value = gl.load(at, mask=c < G, other=-8388608).to(gl.float32, bitcast=True)  # -inf
        token = gl.load(at + 1, mask=c < G, other=V)
        top = gl.max(value, axis=0)
        chosen = gl.min(gl.where(value == top, token, V), axis=0)
        field = mem.state + C.fields_at + slot * SLOT_WORDS
        n = gl.load(field + GENERATED) + 1
        limit = gl.load(field + LIMIT)
        least = gl.load(field + MIN_TOKENS)
        mask = gl.load(mem.state + C.stops_at + slot * C.mask_words + chosen // 32)
        hit = (mask >> (chosen % 32)) & 1
        outcome = gl.where(n >= limit, LENGTH, RUNS)
        outcome = gl.where((hit != 0) & (n > least), STOP, outcome)
        pos = gl.load(rows + t * 8 + 1)
        barrier()
        gl.store(field + POSITION, pos + 1)
        gl.store(field + TOKEN, chosen)
        gl.store(field + GENERATED, n)
        gl.store(field + LIVE, (outcome == RUNS).to(gl.int32))
        gl.store(out + OUT_SLOT, slot)
        gl.store(out + OUT_TOKEN, chosen)
        gl.store(out + OUT_OUTCOME, outcome)
    else:
        gl.store(out + OUT_SLOT, -1)
