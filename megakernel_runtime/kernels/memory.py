"""What every instruction can reach: pointers into global memory, and the CTA's shared memory. Names only."""

from __future__ import annotations

from typing import Any, NamedTuple


class Memory(NamedTuple):
    """Pointers to global memory, as the host allocated them once."""

    meta: Any  # (G, 4) i32: first tile, tiles, first instruction, instructions
    code: Any  # (instructions, 12) i32, see entry.WORDS
    acts: Any  # two of `KernelShape.step_elements` bf16
    partials: Any  # `KernelShape.partial_words` i64: fp32 bits, above them the tag of who wrote them
    resid: Any  # (T, hidden) fp32, each column used by its owner only
    table: Any  # (vocab, hidden) bf16 token embeddings
    bias: Any  # (layers, q + 2 kv) bf16
    qk_norms: Any  # (layers, 2, head_dim) bf16
    cos: Any  # (max_len, head_dim / 2) fp32
    sin: Any  # the same
    kv: Any  # (layers, pages, 2, kv heads, page, head_dim) bf16
    state: Any  # i32 arena of all slots, see KernelShape.fields_at ff.
    plans: Any  # pinned: ring of plan records
    packets: Any  # pinned: ring of writes to the state arena
    head: Any  # pinned: how many plans the host has written; how many of them the kernel has taken
    steps: Any  # pinned: ring of step records
    results: Any  # pinned: ring of (T, TOKEN_WORDS) token records a step
    relay: Any  # i32, a line a CTA and one more: words that one thread reads for all
    cmd: Any  # (2, 1024) i32: head and rows of this and of the next step's plan
    local: Any  # (G, T, 8) i32: a CTA's rows: slot, position, first row of its sequence, its position, token, samples,
    # alive
    leave: Any  # i32, a line a CTA: its producer is to stop
    accounts: Any  # (G, 8) i64: cycles in all, waiting for dependencies, for weights, for the host
    logits: Any  # (T, vocab) fp32
    best: Any  # (G, T, 2) i32: bits of the largest logit of a CTA's rows, its token
    counters: Any  # i32, one cache line each: LM heads done, samplers done, steps published
    abort: Any  # i32: record of the wait that gave up first, see sync.py; zeros if none has
    prof: Any  # (instructions, G, 2) i64: begin and end in the last step


class Shared(NamedTuple):
    """A CTA's shared memory."""

    ring: Any  # (stages, 8, 16, 64) bf16 weight tiles
    full: Any  # barriers: a slot's tile has arrived
    empty: Any  # barriers: a slot is free again
    ring_at: Any  # address of `ring`
    full_at: Any  # address of `full`
    empty_at: Any  # address of `empty`
    scratch: Any  # (2, 8, 16 * T) fp32 partial sums of a row tile
    norms: Any  # (2, 8, T) fp32 partial sums of squares
    v_stage: Any  # (8, tokens, head_dim) bf16 values of a context tile
    tops: Any  # (2, 8, 8) fp32: the warps' largest scores and sums of a span
    q_stage: Any  # (16, head_dim) bf16: a group's rotated queries, the key, the value, columns permuted
    q_plain: Any  # the same, columns as they are
    f_stage: Any  # as q_stage, of another row of the sequence
    f_plain: Any
