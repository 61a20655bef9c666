"""How CTAs hand values to each other: self-validating words, counters, clocks. Must not know: any instruction.

An activation word is 32 bits, two bf16. The pattern EMPTY (two bf16 NaNs that no conversion yields) means "not written
yet": a reader repeats its load until no word is EMPTY, so no fence stands between writer and reader. Each word's
writer empties the same word of the other step parity; the counters at a step's end order that before its next use.
The proof is docs/memory-model.md. Every wait gives up after LIMIT rounds, or at once when `abort[0]` is set: the wait
that gave up first leaves a record there, and the kernel runs the step to its end without waiting.
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon

LIMIT = gl.constexpr(4_000_000)  # rounds of a wait, about two seconds


@gluon.jit
def now_ns(after):
    """The GPU's nanosecond clock; `after`: any value that must exist first."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; // $1", "=l,r", [after], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def fast_reciprocal(x):
    """1 / x within two units in the last place; 0 for infinity."""
    return gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


CONSTANTS_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["l"] * 16 + ["r"] * 16))


@gluon.jit
def load_constants(pointer, active):
    """Sixteen bf16 of constant memory for each thread where `active`, else zeros; see `await_chunks` for which."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.b32 p, $24, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
mov.b32 $4, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0;
@p ld.global.nc.v4.b32 {$0, $2, $4, $6}, [$8]; @p ld.global.nc.v4.b32 {$1, $3, $5, $7}, [$8+64]; }""",
        CONSTANTS_OPERANDS,
        [pointer, active],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=16,
    )


def _await_words(chunks: int, groups: int) -> tuple[str, str]:
    """Assembly of an await and its constraints: `chunks` outputs of `groups` 16-byte words each, awaited together.

    Operands: 4 * chunks * groups output registers, the words of a chunk interleaved, then 8 * groups each of pointer,
    active bits, abort, tag. A chunk's words are 64 bytes apart, chunks 1024.
    """
    words = [(c, w) for c in range(chunks) for w in range(groups)]
    base = 4 * len(words)
    n = 8 * groups
    out = {(c, w): [f"${(4 * c + r) * groups + w}" for r in range(4)] for c, w in words}
    names = {cw: f"m{i}" for i, cw in enumerate(words)}
    lines = [f".reg .pred p, {', '.join(names.values())};", ".reg .b32 n, a, e;", "mov.b32 n, 0;"]
    for (c, w), registers in out.items():
        lines += [f"mov.b32 {r}, 0;" for r in registers]
        lines += [f"and.b32 a, ${base + n}, {1 << c};", f"setp.ne.b32 {names[c, w]}, a, 0;"]
    lines += ["LOOP:"]
    for (c, w), registers in out.items():
        lines.append(
            f"@{names[c, w]} ld.relaxed.gpu.global.v4.b32 {{{', '.join(registers)}}}, [${base}+{1024 * c + 64 * w}];"
        )
    for cw, (r0, r1, r2, r3) in out.items():
        lines += [f"max.u32 a, {r0}, {r1};", f"max.u32 e, {r2}, {r3};", "max.u32 a, a, e;"]
        lines.append(f"setp.eq.and.b32 {names[cw]}, a, -1, {names[cw]};")
    first, *rest = names.values()
    lines += [f"or.pred p, {first}, {first};", *(f"or.pred p, p, {name};" for name in rest), "@!p bra DONE;"]
    abort, tag = base + 2 * n, base + 3 * n
    lines += [
        "add.u32 n, n, 1; and.b32 a, n, 63; setp.ne.b32 p, a, 0; @p bra LOOP;",
        f"ld.relaxed.gpu.global.b32 a, [${abort}]; setp.ne.b32 p, a, 0; @p bra DONE;",
        "setp.lt.u32 p, n, 4000000; @p bra LOOP;",
        f"atom.relaxed.gpu.global.cas.b32 a, [${abort}], 0, ${tag};",
        "DONE:",
    ]
    constraints = ["=&r"] * base + ["l"] * n + ["r"] * n + ["l"] * n + ["r"] * n
    return "{ " + "\n".join(lines) + " }", ",".join(constraints)


FOUR_CHUNKS = gl.constexpr(_await_words(4, 2)[0])
FOUR_CHUNKS_OPERANDS = gl.constexpr(_await_words(4, 2)[1])
ONE_WORD = gl.constexpr(_await_words(1, 1)[0])
ONE_WORD_OPERANDS = gl.constexpr(_await_words(1, 1)[1])


@gluon.jit
def await_chunks(pointer, active, abort, tag):
    """Four bf16 tensors: at `pointer` and 512, 1024, 1536 elements on, where bits 0..3 of `active` say so, else zeros.

    Of each chunk a thread gets 16 elements: 8 at its `pointer` and 8 that lie 32 elements on, in turns of two; the
    tape's columns are permuted to match (resident/tape.py). Each thread loads all its words at once and repeats the
    loads of those that are EMPTY, so that a wait ends one trip to the L2 cache after the last word was written.
    """
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        FOUR_CHUNKS,
        FOUR_CHUNKS_OPERANDS,
        [pointer.to(gl.int64), active, abort.to(gl.int64), tag],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=16,
    )
    return v0, v1, v2, v3


@gluon.jit
def await_word(pointer, active, abort, tag):
    """One bf16 tensor at `pointer` where `active` is 1, else zeros; both are equal for 8 consecutive elements."""
    return gl.inline_asm_elementwise(
        ONE_WORD,
        ONE_WORD_OPERANDS,
        [pointer.to(gl.int64), active, abort.to(gl.int64), tag],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=8,
    )


@gluon.jit
def await_single(pointer, abort, tag):
    """One fp32 at `pointer`, waiting until its bits are not EMPTY."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 n, a, h; mov.b32 n, 0;
LOOP: ld.relaxed.gpu.global.b32 h, [$1]; setp.ne.b32 p, h, -1; @p bra DONE;
add.u32 n, n, 1; and.b32 a, n, 63; setp.ne.b32 p, a, 0; @p bra LOOP;
ld.relaxed.gpu.global.b32 a, [$2]; setp.ne.b32 p, a, 0; @p bra DONE;
setp.lt.u32 p, n, 4000000; @p bra LOOP;
atom.relaxed.gpu.global.cas.b32 a, [$2], 0, $3;
DONE: mov.b32 $0, h; }""",
        "=&r,l,l,r",
        [pointer.to(gl.int64), abort.to(gl.int64), tag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    ).to(gl.float32, bitcast=True)


@gluon.jit
def store_single(pointer, other, value, active):
    """Write fp32 `value` where `active`, and EMPTY at `other`, the same word of the other step parity."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.relaxed.gpu.global.b32 [$1], $3;
@p st.relaxed.gpu.global.b32 [$2], -1; mov.b32 $0, 0; }""",
        "=&r,l,l,r,r",
        [pointer.to(gl.int64), other.to(gl.int64), value.to(gl.int32, bitcast=True), active],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_pairs(pointer, other, value, threads):
    """Write pairs of fp32 `value` as one bf16 word each, and EMPTY at `other`, the same word of the other step parity.

    `value`'s layout holds two consecutive elements of a pointer's row in a thread; from `threads` on are copies.
    """
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 v, t; mov.u32 t, %tid.x; setp.lt.u32 p, t, $8;
cvt.rn.bf16x2.f32 v, $7, $6; @p st.relaxed.gpu.global.b32 [$2], v; @p st.relaxed.gpu.global.b32 [$4], -1;
mov.b32 $0, 0; mov.b32 $1, 0; }""",
        "=&r,=&r,l,l,l,l,f,f,r,r",
        [pointer.to(gl.int64), other.to(gl.int64), value, threads],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def locate(barriers, nonce):
    """Address of an array of mbarriers in shared memory, before they are initialised; 0 if it is not found just once.

    Gluon has no name for such an address. So a mark that only this launch knows is stored there and searched for.
    Waiting and arriving by that address is a warp's own affair, where Gluon's operations stop all warps each time.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    barriers.index(0).store(gl.full([1], 0, gl.int64, layout=LINE) + nonce)
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
def await_phase(address, phase, abort):
    """Wait, each thread for itself, until the mbarrier at `address` has completed the phase of this parity."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 n, a; mov.b32 n, 0;
LOOP: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2, 1000; @p bra DONE;
add.u32 n, n, 1; and.b32 a, n, 63; setp.ne.b32 p, a, 0; @p bra LOOP;
ld.relaxed.gpu.global.b32 a, [$3]; setp.ne.b32 p, a, 0; @p bra DONE;
setp.lt.u32 p, n, 2000000; @p bra LOOP;
atom.relaxed.gpu.global.cas.b32 a, [$3], 0, -1;
DONE: mov.b32 $0, 0; }""",
        "=r,r,r,l",
        [address, phase, abort.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


def _arrive_after(n: int) -> tuple[str, str]:
    """Assembly of `arrive_after` for n accumulators a thread, and its constraints."""
    lines = [".reg .pred p;", ".reg .b32 t;", "mov.u32 t, %laneid;", "setp.eq.u32 p, t, 0;"]
    lines += [f"setp.ne.and.b32 p, ${2 * n}, 0, p;"]
    lines += [f"setp.ne.and.b32 p, ${n + i}, -2, p;" for i in range(n)]
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


@gluon.jit
def signal(counter):
    """After all of this CTA's work so far: add one to `counter`, releasing it to who awaits the counter."""
    barrier()
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
@p red.release.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }""",
        "=r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_counter(counter, target, abort, tag):
    """Wait until `counter` has reached `target` (differences are signed: it may wrap); acquires what was released."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t, v, n, a; mov.u32 t, %tid.x; mov.b32 n, 0; setp.ne.u32 p, t, 0; @p bra DONE;
LOOP: ld.acquire.gpu.global.b32 v, [$1]; sub.s32 v, v, $2; setp.ge.s32 p, v, 0; @p bra DONE;
add.u32 n, n, 1; and.b32 a, n, 63; setp.ne.b32 p, a, 0; @p bra LOOP;
ld.relaxed.gpu.global.b32 a, [$3]; setp.ne.b32 p, a, 0; @p bra DONE;
setp.lt.u32 p, n, 4000000; @p bra LOOP;
atom.relaxed.gpu.global.cas.b32 a, [$3], 0, $4;
DONE: mov.b32 $0, 0; }""",
        "=r,l,r,l,r",
        [counter.to(gl.int64), target, abort.to(gl.int64), tag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    barrier()
