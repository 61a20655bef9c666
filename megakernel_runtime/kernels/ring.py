"""The weight ring's barriers by their addresses: each warp waits and arrives by itself.

Must not know: what tiles hold.
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon


@gluon.jit
def locate(words, nonce):
    """Address of an array (n, 1) of 64-bit words in shared memory, before it is used; 0 if it is not found just once.

    Gluon has no name for such an address. So a mark that only this launch knows is stored there and searched for.
    Waiting and arriving by that address is a warp's own affair, where Gluon's operations stop all warps each time.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    words.index(0).store(gl.full([1], 0, gl.int64, layout=LINE) + nonce)
    barrier()
    first = gl.arange(0, 256, layout=LINE)
    found = gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 a, e, s; .reg .b64 v; mov.u32 a, global_smem; mov.u32 s, %dynamic_smem_size;
add.u32 e, a, s; shl.b32 s, $1, 3; add.u32 a, a, s; mov.b32 $0, 0;
SCAN: setp.ge.u32 p, a, e; @p bra DONE; ld.shared.b64 v, [a]; setp.eq.b64 p, v, $2; @p mov.b32 $0, a;
add.u32 a, a, 2048; bra SCAN; DONE: }""",
        "=&r,r,l",
        [first, nonce],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    times = gl.sum((found != 0).to(gl.int32), axis=0)
    address = gl.max(found, axis=0)
    barrier()
    return gl.where(times == 1, address, 0)


@gluon.jit
def stream_policy():
    """What the L2 cache is to do with weights: they are read once a step, and must not drive out what is read again."""
    return gl.inline_asm_elementwise(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0; // $1",
        "=l,r",
        [gl.to_tensor(0)],
        dtype=gl.int64,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fetch_tile(slot_at, source, full_at, policy, BYTES: gl.constexpr):
    """Begin copying a tile from `source` to shared memory; the mbarrier at `full_at` completes when it is there.

    For a partition of one warp.
    """
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0;
@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3], $5;
@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$1], [$2], $5, [$3], $4;
mov.b32 $0, 0; }""",
        "=r,r,l,r,l,r",
        [slot_at, source.to(gl.int64), full_at, policy, gl.to_tensor(BYTES)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_phase(address, phase, abort):
    """Wait, each thread for itself, until the mbarrier at `address` has completed the phase of this parity.

    Returns the clock cycles waited, 0 if it was complete already.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 n, a; mov.b32 n, 0; mov.b32 $0, 0;
mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @p bra DONE; mov.u32 $0, %clock;
LOOP: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2, 1000; @p bra OVER;
add.u32 n, n, 1; setp.lt.u32 p, n, 2000000; @p bra LOOP;
atom.relaxed.gpu.global.cas.b32 a, [$3], 0, -1; setp.ne.b32 p, a, 0; @p bra OVER;
mov.u32 a, %smid; st.relaxed.gpu.global.b32 [$3+4], a;
OVER: mov.u32 a, %clock; sub.u32 $0, a, $0;
DONE: }""",
        "=&r,r,r,l",
        [address, phase, abort.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_phase_or_leave(address, phase, leave):
    """The producer's wait, which has no deadline of its own: returns 1 once `leave` is set instead, else 0."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 a; mov.b32 $0, 0;
LOOP: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2, 1000; @p bra DONE;
ld.relaxed.gpu.global.b32 a, [$3]; setp.eq.b32 p, a, 0; @p bra LOOP; mov.b32 $0, 1;
DONE: }""",
        "=&r,r,r,l",
        [address, phase, leave.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


def _arrive_after(n: int) -> tuple[str, str]:
    """Assembly of `arrive_after` for n accumulators a thread, and its constraints."""
    lines = [".reg .pred p;", ".reg .b32 t;", "mov.u32 t, %laneid;", "setp.eq.u32 p, t, 0;"]
    lines += [f"setp.ne.and.b32 p, ${2 * n}, 0, p;"]
    lines += [f"setp.ne.and.b32 p, ${n + i}, -2, p;" for i in range(0, n, 4)]  # one register of each MMA's result
    lines += [f"@p mbarrier.arrive.shared::cta.b64 _, [${2 * n}];", *(f"mov.b32 ${i}, 0;" for i in range(n))]
    return "{ " + "\n".join(lines) + " }", ",".join(["=r"] * n + ["r"] * (2 * n))


ARRIVE_4 = gl.constexpr(_arrive_after(4)[0])
ARRIVE_4_OPERANDS = gl.constexpr(_arrive_after(4)[1])
ARRIVE_8 = gl.constexpr(_arrive_after(8)[0])
ARRIVE_8_OPERANDS = gl.constexpr(_arrive_after(8)[1])


@gluon.jit
def arrive_after(acc, address, C: gl.constexpr):
    """One arrival a warp at the mbarrier at `address` (none for 0), once `acc` is there: its operands have been read.

    The comparison with a NaN that no MMA yields ties the arrival to acc: without it the assembler moves the arrival
    up to where the operands' loads have been issued but have not returned, and the next tile overwrites them.
    """
    ASM: gl.constexpr = ARRIVE_4 if C.rows == 8 else ARRIVE_8
    OPERANDS: gl.constexpr = ARRIVE_4_OPERANDS if C.rows == 8 else ARRIVE_8_OPERANDS
    EACH: gl.constexpr = 4 if C.rows == 8 else 8
    args = [acc.to(gl.int32, bitcast=True), address]
    gl.inline_asm_elementwise(ASM, OPERANDS, args, dtype=gl.int32, is_pure=False, pack=EACH)
