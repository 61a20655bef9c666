"""What every instruction can reach: pointers into global memory, and the CTA's shared memory. Names only."""

from __future__ import annotations

from typing import Any, NamedTuple


class Memory(NamedTuple):
    """Pointers to global memory, as the host allocated them once."""

    meta: Any  # (G, 4) i32: first tile, tiles, first instruction, instructions
    code: Any  # (instructions, 12) i32, see entry.WORDS
    acts: Any  # two of `KernelShape.step_elements` bf16
    partials: Any  # two of `KernelShape.partial_elements` fp32
    resid: Any  # (T, hidden) fp32, each column used by its owner only
    table: Any  # (vocab, hidden) bf16 token embeddings
    norm: Any  # (2 layers + 1, hidden) bf16: before attention, before the FFN, ..., final
    bias: Any  # (layers, q + 2 kv) bf16
    qk_norms: Any  # (layers, 2, head_dim) bf16
    cos: Any  # (max_len, head_dim / 2) fp32
    sin: Any  # the same
    kv: Any  # (layers, pages, 2, kv heads, 32, head_dim) bf16
    pages: Any  # (slots, max_pages) i32
    tokens: Any  # (slots, max_len) i32
    lens: Any  # (slots,) i32: tokens known
    rows: Any  # (2, T, 4) i32: slot, position, first row of the same sequence in this step, its position
    logits: Any  # (T, vocab) fp32
    best: Any  # (G, T, 2) i32: bits of the largest logit of a CTA's rows, its token
    counters: Any  # i32, one cache line each: LM heads done, samplers done
    abort: Any  # (1,) i32: tag of the wait that gave up first
    stamps: Any  # (steps,) i64: end of each step, ns
    prof: Any  # (instructions, G, 2) i64: begin and end in the last step


class Shared(NamedTuple):
    """A CTA's shared memory."""

    ring: Any  # (stages, 8, 16, 64) bf16 weight tiles
    full: Any  # barriers: a slot's tile has arrived
    empty: Any  # barriers: a slot is free again
    full_at: Any  # address of `full`
    empty_at: Any  # address of `empty`
    scratch: Any  # (2, 8, 16 * T) fp32 partial sums of a row tile
    norms: Any  # (2, 8, T) fp32 partial sums of squares
    stages: Any  # (2, 8, 16, head_dim) bf16 keys and values of a context tile
    tops: Any  # (2, 8, 8) fp32: the warps' largest scores and sums of a span
    q_stage: Any  # (16, head_dim) bf16: a group's rotated queries, the key, the value
    f_stage: Any  # the same of another row of the sequence
