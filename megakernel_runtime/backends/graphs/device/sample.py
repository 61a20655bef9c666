"""The sampler up to the choice: penalties, bias, masks, logprobs, the peaks of each row.

Each row that samples is one program, or one for each part of the vocabulary where nothing but the part is needed;
program/reference/sampling.py is the meaning. Must not know: models, how a row came about.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megakernel_runtime.backends.graphs.device.slot import (
    BAN_UNTIL,
    BIASED,
    FIELD_WORDS,
    FLAGS,
    FREQUENCY,
    GENERATED,
    LIVE,
    MASK_BITS,
    N_TOP,
    PENALISED,
    PRESENCE,
    PROMPT_COUNT,
    REPETITION,
    RESTRICTED,
    ROW_WORDS,
    load_float,
)
from megakernel_runtime.backends.graphs.device.weights import (
    REST,
    find_candidates,
    largest,
    list_candidates,
)


@triton.jit
def slot_of(outs, rows, fields, o):
    """The slot of output `o`, -1 if there is none or it has finished."""
    row = tl.load(outs + o)
    slot = tl.load(rows + row * ROW_WORDS, mask=row >= 0, other=-1)
    live = tl.load(fields + slot * FIELD_WORDS + LIVE, mask=slot >= 0, other=0)
    return tl.where(live != 0, slot, -1)


@triton.jit
def adjust_kernel(logits, outs, rows, fields, counts, bias, V: tl.constexpr, BLOCK: tl.constexpr):
    """Penalties and bias, in place."""
    o = tl.program_id(0)
    slot = slot_of(outs, rows, fields, o)
    if slot >= 0:
        mine = fields + slot * FIELD_WORDS
        flags = tl.load(mine + FLAGS)
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        of_slot = slot.to(tl.int64) * V + i
        at = logits + o.to(tl.int64) * V + i
        x = tl.load(at, mask=i < V, other=0.0)
        if flags & PENALISED:
            count = tl.load(counts + of_slot, mask=i < V, other=0)
            generated = (count & (PROMPT_COUNT - 1)).to(tl.float32)
            repetition = tl.zeros_like(x) + load_float(mine, REPETITION)
            x = tl.where(count != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
            x -= load_float(mine, PRESENCE) * tl.minimum(generated, 1.0)
            x -= load_float(mine, FREQUENCY) * generated
        if flags & BIASED:
            x += tl.load(bias + of_slot, mask=i < V, other=0.0)
        if flags & (PENALISED | BIASED):
            tl.store(at, x, mask=i < V)


@triton.jit
def mask_kernel(logits, outs, rows, fields, stops, allowed, V: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Logits of tokens that may not be chosen become -inf, in place."""
    o = tl.program_id(0)
    slot = slot_of(outs, rows, fields, o)
    if slot >= 0:
        mine = fields + slot * FIELD_WORDS
        restricted = (tl.load(mine + FLAGS) & RESTRICTED) != 0
        banned = tl.load(mine + GENERATED) < tl.load(mine + BAN_UNTIL)
        if restricted | banned:
            i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            word, bit = slot * WORDS + i // MASK_BITS, i % MASK_BITS
            hidden = (tl.load(stops + word, mask=i < tl.where(banned, V, 0), other=0) >> bit) & 1
            hidden |= ((tl.load(allowed + word, mask=i < tl.where(restricted, V, 0), other=-1) >> bit) & 1) ^ 1
            tl.store(logits + o.to(tl.int64) * V + i, float("-inf"), mask=(i < V) & (hidden != 0))


@triton.jit
def peaks_kernel(
    logits,
    outs,
    rows,
    fields,
    peaks,  # out (outputs, parts)
    peaks_at,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit of each part of the vocabulary, and the first token that has it."""
    o = tl.program_id(0)
    if slot_of(outs, rows, fields, o) >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + o.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
        peak = tl.max(x, 0)
        tl.store(peaks + o * PARTS + tl.program_id(1), peak)
        tl.store(peaks_at + o * PARTS + tl.program_id(1), tl.min(tl.where((x == peak) & (i < V), i, V - 1), 0))


@triton.jit
def logprobs_kernel(
    logits,  # (outputs, V) f32, adjusted and not masked
    outs,
    rows,
    fields,
    peaks,
    peaks_at,
    log_sums,  # out (outputs,) f32
    top_ids,  # out (outputs, MOST)
    top_logprobs,  # out (outputs, MOST) f32
    list_z,
    list_id,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Log of the sum of exponentials, and the likeliest tokens, of rows that want them."""
    o = tl.program_id(0)
    slot = slot_of(outs, rows, fields, o)
    if slot >= 0:
        wanted = tl.load(fields + slot * FIELD_WORDS + N_TOP)
        if wanted >= 0:
            z = logits + o.to(tl.int64) * V
            top, _ = largest(peaks + o * PARTS, peaks_at + o * PARTS, PARTS, PARTS_BLOCK)
            bound, n, total = find_candidates(z, top, 1.0, tl.minimum(wanted, V), 0.0, V, BLOCK)
            log_sum = top + tl.log(total.to(tl.float32))
            tl.store(log_sums + o, log_sum)
            ids = list_id + o.to(tl.int64) * ROOM
            listed = (bound < REST) & (n <= ROOM)
            if listed:
                kept = list_z + o.to(tl.int64) * ROOM
                list_candidates(z, top, 1.0, bound, kept, ids, V, BLOCK)
                z = kept
            else:
                n = V
            store_best(z, ids, n, listed, wanted, log_sum, top_ids + o * MOST, top_logprobs + o * MOST, SHORT)


@triton.jit
def store_best(z, ids, n, listed, wanted, log_sum, to_ids, to_logprobs, BLOCK: tl.constexpr):
    """Write the `wanted` largest in falling order, the smaller index of equal ones first."""
    i = tl.arange(0, BLOCK)
    last = float("inf")
    last_at = -1
    for rank in range(wanted):
        best = float("-inf")
        best_at = n
        for start in range(0, n, BLOCK):
            x = tl.load(z + start + i, mask=start + i < n, other=float("-inf"))
            later = (x < last) | ((x == last) & (start + i > last_at))
            x = tl.where(later & (start + i < n), x, float("-inf"))
            of_block = tl.max(x, 0)
            if of_block > best:
                best = of_block
                best_at = tl.min(tl.where(x == of_block, start + i, n), 0)
        found = best_at < n
        token = tl.where(listed, tl.load(ids + best_at, mask=found & listed, other=0), best_at)
        tl.store(to_ids + rank, tl.where(found, token, -1))
        tl.store(to_logprobs + rank, best - log_sum)
        last = best
        last_at = best_at
