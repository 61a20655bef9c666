"""How CTAs hand values to each other: self-validating words, marked words, counters. Must not know: any instruction.

An activation word is 32 bits, two bf16. The pattern EMPTY (two bf16 NaNs that no conversion yields) means "not written
yet": a reader repeats its load until no word is EMPTY, so no fence stands between writer and reader. Each word's
writer empties the same word of the other step parity; the counters at a step's end order that before its next use.
The proof is docs/memory-model.md. Every wait gives up after about two seconds, or at once when `abort[0]` is set: the
wait that gave up first leaves a record there (words.py), and the kernel runs the step to its end without waiting.
"""

from __future__ import annotations

from megakernel_runtime.kernels.compat import barrier, gl, gluon


@gluon.jit
def cta(C: gl.constexpr):
    """This CTA's number. Where CTAs fill the GPU it is the SM's, so that placement can follow the SMs' speeds."""
    if C.by_sm:
        return gl.inline_asm_elementwise(
            "mov.u32 $0, %smid; // $1", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.program_id(0)


@gluon.jit
def prefetch_line(pointer):
    """Bring the cache line at `pointer` into the L2 cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_tag(op, layer):
    """What is waiting, for the record of a wait that gave up: opcode + 1 in the high half, layer in the low half."""
    return (op + 1) * 65536 + layer


@gluon.jit
def fast_reciprocal(x):
    """1 / x within two units in the last place; 0 for infinity."""
    return gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


KEYS_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["l"] * 16 + ["r"] * 16))


@gluon.jit
def load_keys(pointer, active):
    """Sixteen bf16 of earlier steps for each thread where `active`, else zeros; see `await_chunks` for which."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.b32 p, $24, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
mov.b32 $4, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0;
@p ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$8]; @p ld.global.cg.v4.b32 {$4, $5, $6, $7}, [$8+64]; }""",
        KEYS_OPERANDS,
        [pointer.to(gl.int64), active],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=16,
    )


def _give_up(abort: str, tag: str, where: str, seen: str, expected: str) -> str:
    """Assembly of the end of a wait, with registers a and p: leave a record, unless somebody else has (words.py)."""
    return f"""atom.relaxed.gpu.global.cas.b32 a, [{abort}], 0, {tag}; setp.ne.b32 p, a, 0; @p bra DONE;
mov.u32 a, %smid; st.relaxed.gpu.global.b32 [{abort}+4], a; st.relaxed.gpu.global.b64 [{abort}+8], {where};
st.relaxed.gpu.global.b32 [{abort}+16], {seen}; st.relaxed.gpu.global.b32 [{abort}+20], {expected};
"""


def _await_words(chunks: int, groups: int, apart: int) -> tuple[str, str]:
    """Assembly of an await and its constraints: `chunks` outputs of `groups` 16-byte words each, awaited together.

    Operands: 4 * chunks * groups output registers, word after word, then 8 * groups each of pointer,
    active bits, account, abort, tag. A chunk's words are 64 bytes apart, chunks `apart` bytes. What thread 0 waits
    beyond the first look goes to the account, in clock cycles.
    """
    words = [(c, w) for c in range(chunks) for w in range(groups)]
    base = 4 * len(words)
    n = 8 * groups
    out = {(c, w): [f"${(c * groups + w) * 4 + r}" for r in range(4)] for c, w in words}
    names = {cw: f"m{i}" for i, cw in enumerate(words)}
    lines = [f".reg .pred p, {', '.join(names.values())};", ".reg .b32 n, a, e, b;", ".reg .b64 w;", "mov.b32 n, 0;"]
    for (c, w), registers in out.items():
        lines += [f"mov.b32 {r}, 0;" for r in registers]
        lines += [f"and.b32 a, ${base + n}, {1 << c};", f"setp.ne.b32 {names[c, w]}, a, 0;"]
    lines += ["LOOP:"]
    for (c, w), registers in out.items():
        lines.append(
            f"@{names[c, w]} ld.relaxed.gpu.global.v4.b32 {{{', '.join(registers)}}}, [${base}+{apart * c + 64 * w}];"
        )
    for cw, (r0, r1, r2, r3) in out.items():
        lines += [f"max.u32 a, {r0}, {r1};", f"max.u32 e, {r2}, {r3};", "max.u32 a, a, e;"]
        lines.append(f"setp.eq.and.b32 {names[cw]}, a, -1, {names[cw]};")
    first, *rest = names.values()
    lines += [f"or.pred p, {first}, {first};", *(f"or.pred p, p, {name};" for name in rest), "@!p bra DONE;"]
    account, abort, tag = base + 2 * n, base + 3 * n, base + 4 * n
    lines += [
        "setp.ne.u32 p, n, 0; add.u32 n, n, 1; @!p mov.u32 b, %clock;",
        "and.b32 a, n, 63; setp.ne.b32 p, a, 0; @p bra LOOP;",
        f"ld.relaxed.gpu.global.b32 a, [${abort}]; setp.ne.b32 p, a, 0; @p bra DONE;",
        "setp.lt.u32 p, n, 4000000; @p bra LOOP;",
        _give_up(f"${abort}", f"${tag}", f"${base}", "-1", "0"),
        "DONE: setp.ne.u32 p, n, 0;",
        f"@p setp.ne.b64 p, ${account}, 0; mov.u32 a, %tid.x; setp.eq.and.u32 p, a, 0, p; mov.u32 a, %clock;",
        f"sub.u32 a, a, b; cvt.u64.u32 w, a; @p red.relaxed.gpu.global.add.u64 [${account}], w;",
    ]
    constraints = ["=&r"] * base + ["l"] * n + ["r"] * n + ["l"] * n + ["l"] * n + ["r"] * n
    return "{ " + "\n".join(lines) + " }", ",".join(constraints)


FOUR_CHUNKS = gl.constexpr(_await_words(4, 2, 1024)[0])
FOUR_CHUNKS_OPERANDS = gl.constexpr(_await_words(4, 2, 1024)[1])
TWO_HALVES_64 = gl.constexpr(_await_words(2, 1, 64)[0])
TWO_HALVES_128 = gl.constexpr(_await_words(2, 1, 128)[0])
TWO_HALVES_OPERANDS = gl.constexpr(_await_words(2, 1, 64)[1])


@gluon.jit
def await_chunks(pointer, active, account, abort, tag, C: gl.constexpr):
    """Four bf16 tensors: at `pointer` and 512, 1024, 1536 elements on, where bits 0..3 of `active` say so, else zeros.

    Of each chunk a thread gets 16 elements: 8 at its `pointer` and 8 that lie 32 elements on; the tape's columns are
    permuted to match (resident/tape.py). Each thread loads all its words at once and repeats the
    loads of those that are EMPTY, so that a wait ends one trip to the L2 cache after the last word was written.
    """
    account = account.to(gl.int64) * C.telemetry
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        FOUR_CHUNKS,
        FOUR_CHUNKS_OPERANDS,
        [pointer.to(gl.int64), active, account, abort.to(gl.int64), tag],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=16,
    )
    return v0, v1, v2, v3


@gluon.jit
def await_halves(pointer, active, account, abort, tag, C: gl.constexpr):
    """Two bf16 tensors, at `pointer` and D / 2 elements on, where bits 0 and 1 of `active` say so, else zeros.

    Both arguments are equal for 8 consecutive elements.
    """
    ASM: gl.constexpr = TWO_HALVES_64 if C.head_dim == 64 else TWO_HALVES_128
    account = account.to(gl.int64) * C.telemetry
    lo, hi = gl.inline_asm_elementwise(
        ASM,
        TWO_HALVES_OPERANDS,
        [pointer.to(gl.int64), active, account, abort.to(gl.int64), tag],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=False,
        pack=8,
    )
    return lo, hi


@gluon.jit
def load_tagged(pointer):
    """Begin loading 64-bit words. Not checked."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];",
        "=l,l",
        [pointer.to(gl.int64)],
        dtype=gl.int64,
        is_pure=False,
        pack=1,
    )


TAGGED = gl.constexpr(
    """{ .reg .pred p; .reg .b32 n, a, v, m; .reg .b64 h; mov.b64 {v, m}, $1; mov.b32 n, 0;
CHECK: setp.eq.b32 p, m, $3; @p bra DONE; ld.relaxed.gpu.global.b64 h, [$2]; mov.b64 {v, m}, h;
add.u32 n, n, 1; and.b32 a, n, 63; setp.ne.b32 p, a, 0; @p bra CHECK;
ld.relaxed.gpu.global.b32 a, [$4]; setp.ne.b32 p, a, 0; @p bra DONE;
setp.lt.u32 p, n, 4000000; @p bra CHECK;
"""
    + _give_up("$4", "$5", "$2", "m", "$3")
    + "DONE: mov.b32 $0, v; }"
)


@gluon.jit
def await_tagged(value, pointer, mark, abort, tag):
    """The fp32 part of `value` as `load_tagged` got it from `pointer`; each thread loads again while its mark is not
    `mark`.
    """
    return gl.inline_asm_elementwise(
        TAGGED,
        "=&r,l,l,r,l,r",
        [value, pointer.to(gl.int64), mark, abort.to(gl.int64), tag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    ).to(gl.float32, bitcast=True)


@gluon.jit
def store_tagged(pointer, value, mark, active):
    """Write fp32 `value` and its mark as one word of 64 bits where `active`."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b64 h; setp.ne.b32 p, $4, 0; mov.b64 h, {$2, $3};
@p st.relaxed.gpu.global.b64 [$1], h; mov.b32 $0, 0; }""",
        "=&r,l,r,r,r",
        [pointer.to(gl.int64), value.to(gl.int32, bitcast=True), mark, active],
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


def _await_counter(deadline: bool) -> str:
    """Assembly of `await_counter`."""
    ends = ["setp.lt.u32 p, n, 4000000; @p bra LOOP;", _give_up("$3", "$4", "$1", "v", "$2")]
    return "\n".join(
        (
            "{ .reg .pred p; .reg .b32 t, v, d, n, a;",
            "mov.u32 t, %tid.x; mov.b32 n, 0; setp.ne.u32 p, t, 0; @p bra DONE;",
            "LOOP: ld.acquire.gpu.global.b32 v, [$1]; sub.s32 d, v, $2; setp.ge.s32 p, d, 0; @p bra DONE;",
            "add.u32 n, n, 1; and.b32 a, n, 63; setp.ne.b32 p, a, 0; @p bra LOOP;",
            "ld.relaxed.gpu.global.b32 a, [$3]; setp.ne.b32 p, a, 0; @p bra DONE;",
            *(ends if deadline else ["bra LOOP;"]),
            "DONE: mov.b32 $0, 0; }",
        )
    )


WITH_DEADLINE = gl.constexpr(_await_counter(deadline=True))
WITHOUT_DEADLINE = gl.constexpr(_await_counter(deadline=False))


@gluon.jit
def await_counter(counter, target, abort, tag, deadline: gl.constexpr = True):
    """Wait until `counter` has reached `target` (differences are signed: it may wrap); acquires what was released.

    Without a deadline only `abort` ends the wait: for what the host decides.
    """
    ASM: gl.constexpr = WITH_DEADLINE if deadline else WITHOUT_DEADLINE
    gl.inline_asm_elementwise(
        ASM,
        "=r,l,r,l,r",
        [counter.to(gl.int64), target, abort.to(gl.int64), tag],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    barrier()
