"""The consumers' loop: step after step, a CTA's instructions in order, until the host or a fault ends it.

Must not know: how instructions compute.
"""

from __future__ import annotations

from megakernel_runtime.device_state.fields import FIELD_WORDS, Field
from megakernel_runtime.kernels import words as w
from megakernel_runtime.kernels.attend import attend
from megakernel_runtime.kernels.clocks import account, accounts_of, clock, now_ns, store_clock
from megakernel_runtime.kernels.compat import barrier, gl, gluon
from megakernel_runtime.kernels.context import prefetch, span_count
from megakernel_runtime.kernels.control import decide_early, decide_late, report
from megakernel_runtime.kernels.instructions import embed, matrix
from megakernel_runtime.kernels.matrix import OUT
from megakernel_runtime.kernels.sample import sample
from megakernel_runtime.kernels.sync import await_counter, cta, signal, wait_tag
from megakernel_runtime.program.isa import Op

EMBED = gl.constexpr(int(Op.EMBED))
QKV = gl.constexpr(int(Op.QKV))
ATTEND = gl.constexpr(int(Op.ATTEND))
LM_HEAD = gl.constexpr(int(Op.LM_HEAD))
SAMPLE = gl.constexpr(int(Op.SAMPLE))
# of an instruction: op, layer, first row tile, row tiles, source, destination, columns, width, whether normed
WORDS = gl.constexpr(12)
CMD_WORDS = gl.constexpr(w.CMD_WORDS)
LINE = gl.constexpr(32)  # words of a cache line: one counter each
KIND = gl.constexpr(w.KIND)
QUIT = gl.constexpr(w.QUIT)
PLAN = gl.constexpr(w.PLAN)
N_DECODE = gl.constexpr(w.N_DECODE)
N_PREFILL = gl.constexpr(w.N_PREFILL)
ROWS_AT = gl.constexpr(w.ROWS_AT)
SAMPLES = gl.constexpr(w.SAMPLES)
SLOT_WORDS = gl.constexpr(FIELD_WORDS)
POSITION = gl.constexpr(int(Field.POSITION))
TOKEN = gl.constexpr(int(Field.TOKEN))
LIVE = gl.constexpr(int(Field.LIVE))
ROOM = gl.constexpr(int(Field.ROOM))
TOTAL = gl.constexpr(w.TOTAL)
DEPENDENCY = gl.constexpr(w.DEPENDENCY)
MEMORY = gl.constexpr(w.MEMORY)
HOST = gl.constexpr(w.HOST)
NANOSECONDS = gl.constexpr(w.NANOSECONDS)
BEGAN = gl.constexpr(w.BEGAN_HEAD)
LEFT = gl.constexpr(w.LEFT_HEAD)


@gluon.jit
def compose(mem, cmd, rows, C: gl.constexpr):
    """Write this CTA's own table of the step's rows; decode rows' positions and tokens come from their slots' fields.

    Rows of slots that have ended, or have no room for another position, are not alive: they are computed, as if at
    position 0, but write no keys and sample nothing. Returns how many rows there are, and the most spans of one.
    """
    T: gl.constexpr = C.rows
    FIELDS_AT: gl.constexpr = C.fields_at
    t = gl.arange(0, T, layout=gl.SliceLayout(0, OUT))
    n_decode = gl.load(cmd + N_DECODE, volatile=True)
    n_rows = n_decode + gl.load(cmd + N_PREFILL, volatile=True)
    word = cmd + ROWS_AT + t * 4
    here = t < n_rows
    slot = gl.load(word, mask=here, other=0, volatile=True)
    pos = gl.load(word + 1, mask=here, other=0, volatile=True)
    row0 = gl.load(word + 2, mask=here, other=0, volatile=True)
    token = gl.load(word + 3, mask=here, other=0, volatile=True)
    decodes = t < n_decode
    field = mem.state + FIELDS_AT + slot * SLOT_WORDS
    at = gl.load(field + POSITION, mask=decodes, other=0, volatile=True)
    room = gl.load(field + ROOM, mask=decodes, other=0, volatile=True)
    alive = gl.load(field + LIVE, mask=decodes, other=0, volatile=True) != 0
    alive = gl.where(decodes, alive & (at < room), here)
    samples = gl.where(decodes, alive.to(gl.int32), token // SAMPLES)
    token = gl.where(decodes, gl.load(field + TOKEN, mask=decodes, other=0, volatile=True), token % SAMPLES)
    pos = gl.where(decodes, at, pos)
    pos = gl.where(alive, pos, 0)
    row0 = gl.where(decodes, t, row0)
    gl.store(rows + t * 8, slot)
    gl.store(rows + t * 8 + 1, pos)
    gl.store(rows + t * 8 + 2, row0)
    gl.store(rows + t * 8 + 3, pos - (t - row0))
    gl.store(rows + t * 8 + 4, token)
    gl.store(rows + t * 8 + 5, samples)
    gl.store(rows + t * 8 + 6, alive.to(gl.int32))
    count, _first, _lo = span_count(pos, C)
    spans = gl.maximum(gl.max(count, axis=0), 1)
    barrier()
    return n_rows, spans


@gluon.jit
def run_step(ring, turn, taken, mem, smem, cmd, next_cmd, rows, s, n_rows, rows_before, spans, C: gl.constexpr):
    """Run this CTA's instructions. CTA 0 decides on the next step at the LM head, late, but while others still work.

    taken: see `decide_early`.
    """
    G: gl.constexpr = C.grid
    SIZE: gl.constexpr = C.step_elements
    PROF: gl.constexpr = C.profile
    LAYERS: gl.constexpr = C.layers
    c = cta(C)
    parity = s & 1
    acts = mem.acts + parity * SIZE
    delta = SIZE - 2 * SIZE * parity
    at = gl.load(mem.meta + 4 * c + 2)
    n_code = gl.load(mem.meta + 4 * c + 3)
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
        normed = gl.load(word + 8)
        word += WORDS
        tag = wait_tag(op, layer)
        if PROF:
            gl.store(mem.prof + (i * G + c) * 3, now_ns(tag))
        if op == ATTEND:
            mark = s * LAYERS + layer
            attend(mem, smem, acts, rows, delta, layer, n_rows, rows_before, spans, mark, tag, C)
        elif op == EMBED:
            embed(mem, acts, rows, delta, first, count, n_rows, C)
        elif op == SAMPLE:
            signal(mem.counters)
            if c < n_rows:
                await_counter(mem.counters, (s + 1) * G, mem.abort, tag)
                t = c
                while t < n_rows:
                    sample(mem, rows, s, t, C)
                    t += G
            if C.drops:
                drop = (gl.load(mem.abort + 8, volatile=True) == s + 1) & (c == 1)
                if drop == 0:
                    signal(mem.counters + LINE)
            else:
                signal(mem.counters + LINE)
        else:
            if op == QKV:
                prefetch(mem, rows, layer, n_rows, spans, C)
            if (op == LM_HEAD) & (c == 0):
                taken = decide_early(mem, cmd, next_cmd, s, taken, C)
            work = (op, first, count, src, dst, columns, width, normed)
            seen = mem.prof + (i * G + c) * 3 + 2
            ring, turn = matrix(ring, turn, mem, smem, acts, delta, work, n_rows, tag, seen, C)
        if PROF:
            gl.store(mem.prof + (i * G + c) * 3 + 1, now_ns(tag))
    return ring, turn, taken


@gluon.jit
def await_step(mem, cmd, s, taken, park_ns, C: gl.constexpr):
    """Wait until the step before is over everywhere, then until step s is published; CTA 0 publishes it if need be."""
    G: gl.constexpr = C.grid
    c = cta(C)
    accounts = accounts_of(mem, c)
    begun = clock(s)
    # what all CTAs did in the step before, its samplers' slot fields among it, is visible from here on
    await_counter(mem.counters + LINE, s * G, mem.abort, 1)
    over = clock(s)
    published, plans, lease = taken
    if (c == 0) & (published == 0):
        taken = decide_late(mem, cmd, s, plans, park_ns, C)
    await_counter(mem.counters + 2 * LINE, s + 1, mem.abort, 2, False)
    account(accounts + DEPENDENCY, over - begun, C)
    account(accounts + HOST, clock(s) - over, C)
    return taken


@gluon.jit
def consumer(mem, smem, plans, park_ns, C: gl.constexpr):
    """Run steps as they are published; CTA 0 publishes them. `plans`: how many the host wrote that are done already."""
    G: gl.constexpr = C.grid
    T: gl.constexpr = C.rows
    c = cta(C)
    rows = mem.local + c * (T * 8)
    accounts = accounts_of(mem, c)
    ring = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    turn = 0
    s = 0
    taken = (gl.to_tensor(0), plans, gl.to_tensor(0))
    rows_before = gl.to_tensor(0)
    index = 0
    running = 1
    if c == 0:
        store_clock(mem.head + BEGAN, s)
    while running == 1:
        cmd = mem.cmd + (s & 1) * CMD_WORDS
        next_cmd = mem.cmd + (1 - (s & 1)) * CMD_WORDS
        begun = clock(s)
        begun_ns = now_ns(s)
        taken = await_step(mem, cmd, s, taken, park_ns, C)
        began_ns = now_ns(s)
        if gl.load(cmd + KIND, volatile=True) == QUIT:
            running = 0
        else:
            n_rows, spans = compose(mem, cmd, rows, C)
            ring, turn, taken = run_step(
                ring, turn, taken, mem, smem, cmd, next_cmd, rows, s, n_rows, rows_before, spans, C
            )
            rows_before = n_rows
            if c == 0:
                await_counter(mem.counters + LINE, (s + 1) * G, mem.abort, 3)
                published, plans, _lease = taken
                same = (published != 0) & (
                    gl.load(next_cmd + PLAN, volatile=True) == gl.load(cmd + PLAN, volatile=True)
                )
                report(mem, cmd, s, index, 1 - same.to(gl.int32), began_ns)
                index = gl.where(same, index + 1, 0)
            slot, phase, last, waited = ring
            account(accounts + MEMORY, waited, C)
            ring = (slot, phase, last, waited * 0)
            s += 1
        account(accounts + TOTAL, clock(s) - begun, C)
        account(accounts + NANOSECONDS, now_ns(s) - begun_ns, C)
    if c == 0:
        store_clock(mem.head + LEFT, s)
    gl.store(mem.leave + c * LINE, 1)
