"""The sampler's choice of a token for each row, and what the choice does to the row's slot.

Each row that samples is one program. Must not know: models, how a row came about.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megakernel_runtime.backends.graphs.device.sample import slot_of
from megakernel_runtime.backends.graphs.device.slot import (
    FIELD_WORDS,
    FLAGS,
    GENERATED,
    LENGTH,
    LIMIT,
    LIVE,
    MIN_P,
    MIN_TOKENS,
    PENALISED,
    POSITION,
    RUNS,
    SEED_HIGH,
    SEED_LOW,
    SKIPPED,
    STOP,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    has_bit,
    load_double,
    load_float,
)
from megakernel_runtime.backends.graphs.device.weights import (
    REST,
    above,
    draw,
    find_candidates,
    largest,
    list_candidates,
    threshold,
)


@triton.jit
def random_number(mine):
    """The number in [0, 1) that chooses the slot's next token: program/philox.py."""
    index = tl.load(mine + GENERATED).to(tl.uint32)
    zero = index * 0
    low, high = tl.load(mine + SEED_LOW).to(tl.uint32), tl.load(mine + SEED_HIGH).to(tl.uint32)
    word, _, _, _ = tl.philox_impl(index, zero, zero, zero, low, high)
    return word.to(tl.float64) * 2.3283064365386963e-10  # 2**-32


@triton.jit
def cut(z, n, top, temperature, k, share, total, BLOCK: tl.constexpr):
    """Where top-k and top-p cut: (bits of the lightest kept weight, how many of that weight are kept)."""
    bits_at = -1
    n_equal = 0
    if k > 0:
        bits_at = threshold(z, n, top, temperature, k, total, 0, False, BLOCK)
        more, mass, _ = above(z, n, top, temperature, bits_at, BLOCK)
        n_equal = k - more
        total = mass + n_equal * bits_at.to(tl.float32, bitcast=True).to(tl.float64)
    if share < 1.0:
        wanted = share * total
        floor = bits_at
        bits_at = threshold(z, n, top, temperature, k, wanted, floor, True, BLOCK)
        _, mass, equal = above(z, n, top, temperature, bits_at, BLOCK)
        if bits_at == floor:
            equal = n_equal
        weight = bits_at.to(tl.float32, bitcast=True).to(tl.float64)
        missing = tl.ceil((wanted - mass) / tl.where(weight > 0.0, weight, 1.0))
        n_equal = tl.minimum(tl.maximum(missing.to(tl.int32), 1), equal)
    return bits_at, n_equal


@triton.jit
def choose(
    z, top, best, mine, list_z, list_id, V: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr
):
    """The next token of the slot whose fields are `mine`, from its logits z (V,), of which `best` has the largest."""
    chosen = best
    temperature = load_float(mine, TEMPERATURE)
    if temperature > 0.0:
        uniform = random_number(mine)
        k = tl.load(mine + TOP_K)
        share = load_double(mine, TOP_P)
        least = load_float(mine, MIN_P)
        if (k > 0) | (share < 1.0):
            bound, n, total = find_candidates(z, top, temperature, k, tl.where(share < 1.0, share, 0.0), V, BLOCK)
            if (bound < REST) & (n <= ROOM):
                list_candidates(z, top, temperature, bound, list_z, list_id, V, BLOCK)
                bits_at, n_equal = cut(list_z, n, top, temperature, k, share, total, SHORT)
                at = draw(list_z, n, top, temperature, bits_at, n_equal, least, uniform, SHORT)
                chosen = tl.where(at >= 0, tl.load(list_id + tl.maximum(at, 0)), chosen)
            else:
                bits_at, n_equal = cut(z, V, top, temperature, k, share, total, SHORT)
                at = draw(z, V, top, temperature, bits_at, n_equal, least, uniform, BLOCK)
                chosen = tl.where(at >= 0, at, chosen)
        else:
            at = draw(z, V, top, temperature, -1, 0, least, uniform, BLOCK)
            chosen = tl.where(at >= 0, at, chosen)
    return chosen


@triton.jit
def advance(mine, stops, token, position):
    """Append `token` to the slot, which was computed up to `position`; return its outcome."""
    generated = tl.load(mine + GENERATED) + 1
    stopped = (has_bit(stops, token) != 0) & (generated > tl.load(mine + MIN_TOKENS))
    outcome = tl.where(stopped, STOP, tl.where(generated >= tl.load(mine + LIMIT), LENGTH, RUNS))
    tl.store(mine + TOKEN, token)
    tl.store(mine + POSITION, position + 1)
    tl.store(mine + GENERATED, generated)
    tl.store(mine + LIVE, (outcome == RUNS).to(tl.int32))
    return outcome


@triton.jit
def choose_kernel(
    logits,  # (outputs, V) f32
    outs,
    rows,
    positions,
    fields,
    stops,
    counts,
    peaks,
    peaks_at,
    log_sums,
    result,  # out (outputs, 4): token, outcome, logprob (f32), 0
    list_z,  # scratch (outputs, ROOM)
    list_id,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    ROOM: tl.constexpr,
    FULL: tl.constexpr,  # logits were adjusted and logprobs computed
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Choose a token for each output and advance its slot."""
    o = tl.program_id(0)
    slot = slot_of(outs, rows, fields, o)
    tl.store(result + o * 4 + 1, SKIPPED)
    if slot >= 0:
        mine = fields + slot * FIELD_WORDS
        z = logits + o.to(tl.int64) * V
        room = o.to(tl.int64) * ROOM
        top, best = largest(peaks + o * PARTS, peaks_at + o * PARTS, PARTS, PARTS_BLOCK)
        token = choose(z, top, best, mine, list_z + room, list_id + room, V, ROOM, BLOCK, SHORT)
        if FULL:
            logprob = tl.load(z + token) - tl.load(log_sums + o)
            tl.store(result + o * 4 + 2, logprob.to(tl.int32, bitcast=True))
            if tl.load(mine + FLAGS) & PENALISED:
                at = counts + slot.to(tl.int64) * V + token
                tl.store(at, tl.load(at) + 1)
        tl.debug_barrier()  # every thread has read the slot before one of them moves it on
        outcome = advance(mine, stops + slot * WORDS, token, tl.load(positions + tl.load(outs + o)))
        tl.store(result + o * 4, token)
        tl.store(result + o * 4 + 1, outcome)
