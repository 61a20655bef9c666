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
def load_constants(pointer, active):
    """Eight bf16 of constant memory at `pointer` (equal for 8 consecutive elements) where `active`, else zeros."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.b32 p, $12, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }""",
        "=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l,r,r,r,r,r,r,r,r",
        [pointer, active],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=8,
    )


def _await_words(chunks: int, groups: int) -> tuple[str, str]:
    """Assembly of `await_words` and its constraints: `chunks` outputs of `groups` 16-byte words each, awaited together.

    Operands: 4 * chunks * groups output registers, then 8 * groups each of pointer, active bits, abort, tag.
    """
    words = [(c, w) for c in range(chunks) for w in range(groups)]
    base = 4 * len(words)
    n = 8 * groups
    out = {cw: [f"${4 * i + r}" for r in range(4)] for i, cw in enumerate(words)}
    names = {cw: f"m{i}" for i, cw in enumerate(words)}
    lines = [f".reg .pred p, {', '.join(names.values())};", ".reg .b32 n, a, e;", "mov.b32 n, 0;"]
    for (c, w), registers in out.items():
        lines += [f"mov.b32 {r}, 0;" for r in registers]
        lines += [f"and.b32 a, ${base + n + 8 * w}, {1 << c};", f"setp.ne.b32 {names[c, w]}, a, 0;"]
    lines += ["LOOP:"]
    for (c, w), registers in out.items():
        lines.append(
            f"@{names[c, w]} ld.relaxed.gpu.global.v4.b32 {{{', '.join(registers)}}}, [${base + 8 * w}+{1024 * c}];"
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

    `pointer` and `active` are equal for 8 consecutive elements. Each thread loads all its words at once and repeats
    the loads of those that are EMPTY, so that a wait ends one trip to the L2 cache after the last word was written.
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
