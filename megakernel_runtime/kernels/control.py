"""CTA 0's second job: take plans from the host, say what the next step is, report steps. Must not know: instructions.

A plan that only goes on is taken while the step before it still runs, so that nobody waits for the host; one that
writes slot states or page tables is taken after it, for the step may use them. What all threads must agree on is read
by one and passed on in memory.
"""

from __future__ import annotations

from megakernel_runtime.device_state.fields import FIELD_WORDS, Field
from megakernel_runtime.kernels import words as w
from megakernel_runtime.kernels.clocks import now_ns
from megakernel_runtime.kernels.compat import barrier, gl, gluon

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
PLANS = gl.constexpr(w.PLANS)
RECORD = gl.constexpr(w.RECORD)
RUN = gl.constexpr(w.RUN)
QUIT = gl.constexpr(w.QUIT)
APPLY = gl.constexpr(w.APPLY)
KIND = gl.constexpr(w.KIND)
PLAN = gl.constexpr(w.PLAN)
N_DECODE = gl.constexpr(w.N_DECODE)
N_PREFILL = gl.constexpr(w.N_PREFILL)
LEASE = gl.constexpr(w.LEASE)
N_WRITES = gl.constexpr(w.N_WRITES)
ROWS_AT = gl.constexpr(w.ROWS_AT)
ROW_WORDS = gl.constexpr(w.ROW_WORDS)
WRITES_FROM = gl.constexpr(w.WRITES_FROM)
N_CLEARS = gl.constexpr(w.N_CLEARS)
CLEARS_AT = gl.constexpr(w.CLEARS_AT)
PACKETS = gl.constexpr(w.PACKETS)
SLOT_WORDS = gl.constexpr(FIELD_WORDS)
POSITION = gl.constexpr(int(Field.POSITION))
GENERATED = gl.constexpr(int(Field.GENERATED))
LIMIT = gl.constexpr(int(Field.LIMIT))
LIVE = gl.constexpr(int(Field.LIVE))
ROOM = gl.constexpr(int(Field.ROOM))
LAST_MARK = gl.constexpr(1 << 30)  # attention marks its partial results with step * layers + layer, in 32 bits
RESULTS = gl.constexpr(w.RESULTS)
STEP_WORDS = gl.constexpr(w.STEP_WORDS)
CMD_WORDS = gl.constexpr(w.CMD_WORDS)


@gluon.jit
def read_by_one(pointer, relay):
    """Return the word at `pointer` in host or device memory, the same for all threads, acquired at system scope."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t, v; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
@p ld.acquire.sys.global.b32 v, [$1]; @p st.relaxed.gpu.global.b32 [$2], v; mov.b32 $0, 0; }""",
        "=r,l,l",
        [pointer.to(gl.int64), relay.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    barrier()
    value = gl.load(relay, volatile=True)
    barrier()
    return value


@gluon.jit
def publish(counter, value):
    """After all of this CTA's writes: set `counter`, releasing them."""
    barrier()
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
@p st.release.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }""",
        "=r,l,r",
        [counter.to(gl.int64), value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def copy_record(mem, number, cmd, C: gl.constexpr):
    """Copy the head and rows of plan record `number` to `cmd`."""
    T: gl.constexpr = C.rows
    i = gl.arange(0, 256, layout=LINE)
    record = mem.plans + number % PLANS * RECORD
    value = gl.load(record + i, mask=i < ROWS_AT + T * ROW_WORDS, other=0, volatile=True)
    gl.store(cmd + i, value, mask=i < ROWS_AT + T * ROW_WORDS)
    barrier()


@gluon.jit
def apply_writes(mem, number, cmd):
    """Clear what plan record `number` clears in the state arena, then write its (word, value) pairs. Plan in `cmd`."""
    i = gl.arange(0, 256, layout=LINE)
    n_clears = gl.load(cmd + N_CLEARS, volatile=True)
    clears = mem.plans + number % PLANS * RECORD + CLEARS_AT
    for k in range(n_clears):
        first = gl.load(clears + 2 * k, volatile=True)
        n = gl.load(clears + 2 * k + 1, volatile=True)
        for at in range(0, n, 256):
            gl.store(mem.state + first + at + i, gl.zeros([256], gl.int32, layout=LINE), mask=at + i < n)
    barrier()
    n = gl.load(cmd + N_WRITES, volatile=True)
    start = gl.load(cmd + WRITES_FROM, volatile=True)
    for at in range(0, n, 256):
        here = at + i < n
        pair = mem.packets + (start + at + i) % PACKETS * 2
        word = gl.load(pair, mask=here, other=0, volatile=True)
        value = gl.load(pair + 1, mask=here, other=0, volatile=True)
        gl.store(mem.state + word, value, mask=here)
    barrier()


@gluon.jit
def lease_goes_on(mem, cmd, C: gl.constexpr):
    """Whether a decode row of the running step will live on, and every live one has room for its next position."""
    T: gl.constexpr = C.rows
    FIELDS_AT: gl.constexpr = C.fields_at
    t = gl.arange(0, T, layout=LINE)
    mine = t < gl.load(cmd + N_DECODE, volatile=True)
    slot = gl.load(cmd + ROWS_AT + t * ROW_WORDS, mask=mine, other=0, volatile=True)
    field = mem.state + FIELDS_AT + slot * SLOT_WORDS
    room = gl.load(field + POSITION, mask=mine, other=0, volatile=True) + 1 < gl.load(
        field + ROOM, mask=mine, other=0, volatile=True
    )
    more = gl.load(field + GENERATED, mask=mine, other=0, volatile=True) + 1 < gl.load(
        field + LIMIT, mask=mine, other=0, volatile=True
    )
    goes_on = mine & more & (gl.load(field + LIVE, mask=mine, other=0, volatile=True) != 0)
    any_goes_on = gl.max(goes_on.to(gl.int32), axis=0) != 0
    return any_goes_on & (gl.max((goes_on & (room == 0)).to(gl.int32), axis=0) == 0)


@gluon.jit
def repeat_rows(cmd, next_cmd, C: gl.constexpr):
    """Make the next step's command the running one's without its prefill rows."""
    T: gl.constexpr = C.rows
    i = gl.arange(0, 256, layout=LINE)
    mask = i < ROWS_AT + T * ROW_WORDS
    value = gl.load(cmd + i, mask=mask, other=0, volatile=True)
    gl.store(next_cmd + i, gl.where(i == N_PREFILL, 0, value), mask=mask)


@gluon.jit
def decide_early(mem, cmd, next_cmd, s, taken, C: gl.constexpr):
    """During step s: publish step s + 1 if it needs no writes.

    taken, given and returned: whether the next step is published, plans taken from the host, steps left of the lease.
    """
    LAYERS: gl.constexpr = C.layers
    published, plans, lease = taken
    published = gl.to_tensor(0)
    head = read_by_one(mem.head, mem.relay)
    aborted = read_by_one(mem.abort, mem.relay)
    if (aborted != 0) | (s >= LAST_MARK // LAYERS):
        lease = lease * 0
    elif head - plans > 0:
        copy_record(mem, plans, next_cmd, C)
        kind = gl.load(next_cmd + KIND, volatile=True)
        changes = gl.load(next_cmd + N_WRITES, volatile=True) + gl.load(next_cmd + N_CLEARS, volatile=True)
        if (changes == 0) & (kind == RUN):
            plans += 1
            gl.store(mem.head + 1, plans)
            lease = gl.load(next_cmd + LEASE, volatile=True) - 1
            publish(mem.counters + 64, s + 2)
            published += 1
    elif lease > 0:
        if lease_goes_on(mem, cmd, C):
            repeat_rows(cmd, next_cmd, C)
            lease -= 1
            publish(mem.counters + 64, s + 2)
            published += 1
        else:
            lease = lease * 0
    return published, plans, lease


@gluon.jit
def read_clock_by_one(begun, park_ns, relay):
    """Whether more than `park_ns` have passed since `begun`: one thread decides for all, for their clocks differ."""
    late = (now_ns(0) - begun > park_ns).to(gl.int32)
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
@p st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }""",
        "=r,l,r",
        [relay.to(gl.int64), late],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    barrier()
    late = gl.load(relay, volatile=True)
    barrier()
    return late


@gluon.jit
def decide_late(mem, next_cmd, s, plans, park_ns, C: gl.constexpr):
    """Between steps: wait for a plan that runs, and publish it as step s. Returns what `decide_early` does.

    After `park_ns` without one, on abort, or when marks run out, the step published is QUIT: the kernel leaves the GPU.
    """
    LAYERS: gl.constexpr = C.layers
    lease = gl.to_tensor(0)
    waiting = gl.to_tensor(1)
    begun = now_ns(s)
    while waiting == 1:
        head = read_by_one(mem.head, mem.relay)
        aborted = read_by_one(mem.abort, mem.relay)
        if (aborted != 0) | (s >= LAST_MARK // LAYERS):
            leave(mem)
            waiting = waiting * 0
        elif head - plans > 0:
            copy_record(mem, plans, next_cmd, C)
            apply_writes(mem, plans, next_cmd)
            plans += 1
            gl.store(mem.head + 1, plans)
            kind = gl.load(next_cmd + KIND, volatile=True)
            if kind != APPLY:
                lease = gl.load(next_cmd + LEASE, volatile=True) - 1
                waiting = waiting * 0
            begun = now_ns(head)
        elif read_clock_by_one(begun, park_ns, mem.relay) != 0:
            leave(mem)
            waiting = waiting * 0
    publish(mem.counters + 64, s + 1)
    return gl.to_tensor(0), plans, lease


@gluon.jit
def leave(mem):
    """Make QUIT the command of this and of the next step: whoever runs on without waiting, after an abort, meets it."""
    gl.store(mem.cmd + KIND, QUIT)
    gl.store(mem.cmd + CMD_WORDS + KIND, QUIT)


@gluon.jit
def report(mem, cmd, s, index, last, began):
    """Tell the host that step s is over; what its samplers wrote is there when it sees this. Not after an abort."""
    ended = now_ns(s)
    sound = (read_by_one(mem.abort, mem.relay) == 0).to(gl.int32)
    record = mem.steps + s % RESULTS * STEP_WORDS
    plan = gl.load(cmd + PLAN, volatile=True)
    n_rows = gl.load(cmd + N_DECODE, volatile=True) + gl.load(cmd + N_PREFILL, volatile=True)
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.ne.and.b32 p, $9, 0, p;
@p st.relaxed.sys.global.b32 [$1+4], $2; @p st.relaxed.sys.global.b32 [$1+8], $3;
@p st.relaxed.sys.global.b32 [$1+12], $4; @p st.relaxed.sys.global.b32 [$1+16], $5;
@p st.relaxed.sys.global.b64 [$1+24], $6; @p st.relaxed.sys.global.b64 [$1+32], $7;
@p st.release.sys.global.b32 [$1], $8; mov.b32 $0, 0; }""",
        "=r,l,r,r,r,r,l,l,r,r",
        [record.to(gl.int64), plan, index, n_rows, last, began, ended, s + 1, sound],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
