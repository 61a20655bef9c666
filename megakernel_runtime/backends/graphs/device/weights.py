"""Passes over one row of logits: its peak, its likeliest candidates, the weight at which a cut falls, a draw.

A row belongs to one program. What may still be chosen is looked at in full once or twice, then as a short list of
candidates in rising token order. Weights are exp((logit - largest) / temperature), compared by their bits, which rise
with them. Must not know: slots, steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
REST = tl.constexpr(63)  # candidates are binned by how often their weight has halved; from so often on they are one bin
BINS = tl.constexpr(128)
TRIED = tl.constexpr(16)  # thresholds tried at once
TRIED_BITS = tl.constexpr(4)
WEIGHT_BITS = tl.constexpr(30)  # of weights in 0..1 as integers


@triton.jit
def largest(peaks, peaks_at, N: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of N peaks and the smallest index at which one so large lies."""
    i = tl.arange(0, BLOCK)
    peak = tl.load(peaks + i, mask=i < N, other=float("-inf"))
    at = tl.load(peaks_at + i, mask=i < N, other=2**31 - 1)
    top = tl.max(peak, 0)
    return top, tl.min(tl.where(peak == top, at, 2**31 - 1), 0)


@triton.jit
def drops(z, i, n, top, temperature):
    """How far logits lie below the largest, over the temperature; infinite from `n` on."""
    x = tl.load(z + i, mask=i < n, other=float("-inf"))
    return tl.div_rn(top - x, tl.zeros_like(x) + temperature)


@triton.jit
def weights_and_bits(z, i, n, top, temperature):
    """Weights and their bits; 0 from `n` on."""
    w = tl.exp(-drops(z, i, n, top, temperature))
    return w, w.to(tl.int32, bitcast=True)


@triton.jit
def halvings(drop):
    """How often weights have halved, at most REST."""
    return tl.minimum(drop * LOG2E, REST * 1.0)


@triton.jit
def find_candidates(z, top, temperature, k, share, N: tl.constexpr, BLOCK: tl.constexpr):
    """How many halvings of the largest weight hold the k heaviest and the `share` of all weight: (bound, how many
    tokens lie within, weight of all). A bound of REST means that only all tokens are sure to do.
    """
    i = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, N, BLOCK):
        drop = drops(z, start + i, N, top, temperature)
        counts += tl.histogram(tl.where(start + i < N, halvings(drop).to(tl.int32), REST + 1), BINS)
        total += tl.exp(-drop).to(tl.float64)
    everything = tl.sum(total, 0)
    b = tl.arange(0, BINS)
    counts = tl.where(b <= REST, counts, 0)
    heaviest = counts.to(tl.float64) * tl.exp2(-b.to(tl.float32)).to(tl.float64)  # no bin weighs more than this
    rest = tl.sum(heaviest, 0) - tl.cumsum(heaviest, 0)
    within = tl.cumsum(counts, 0)
    enough = (within >= k) & (rest * 1.001 <= (1.0 - share) * everything)
    bound = tl.min(tl.where(enough & (b < REST), b, REST), 0)
    return bound, tl.sum(tl.where(b <= bound, counts, 0), 0), everything


@triton.jit
def list_candidates(z, top, temperature, bound, list_z, list_id, N: tl.constexpr, BLOCK: tl.constexpr):
    """Write logits and ids of the tokens within `bound` halvings into lists, in rising order of ids."""
    i = tl.arange(0, BLOCK)
    found = 0
    for start in range(0, N, BLOCK):
        x = tl.load(z + start + i, mask=start + i < N, other=float("-inf"))
        within = halvings(drops(z, start + i, N, top, temperature)).to(tl.int32) <= bound
        within = within & (start + i < N)
        to = found + tl.cumsum(within.to(tl.int32), 0) - 1
        tl.store(list_z + to, x, mask=within)
        tl.store(list_id + to, start + i, mask=within)
        found += tl.sum(within.to(tl.int32), 0)
    tl.debug_barrier()  # all threads read what each has written


@triton.jit
def threshold(z, n, top, temperature, k, mass, floor, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest weight (bits) so that the tokens of at least that weight are at least `k`, or weigh at least `mass`.

    By mass, `floor` is known to do. Finds four bits in each round, from the highest.
    """
    i = tl.arange(0, BLOCK)
    j = tl.arange(0, TRIED)
    low = 0
    for step in range((WEIGHT_BITS + TRIED_BITS - 1) // TRIED_BITS):
        shift = tl.maximum(WEIGHT_BITS - TRIED_BITS * (step + 1), 0)
        tried = low + (j << shift)
        sums = tl.zeros([TRIED], tl.float64)
        for start in range(0, n, BLOCK):
            w, bits = weights_and_bits(z, start + i, n, top, temperature)
            counted = (bits[:, None] >= tried[None, :]) & (start + i < n)[:, None]
            if BY_MASS:
                sums += tl.sum(tl.where(counted, w[:, None], 0.0).to(tl.float64), 0)
            else:
                sums += tl.sum(counted.to(tl.int32), 0).to(tl.float64)
        enough = (sums >= mass) | (tried <= floor) if BY_MASS else sums >= k
        low += tl.maximum(tl.sum(enough.to(tl.int32), 0) - 1, 0) << shift
    return low


@triton.jit
def above(z, n, top, temperature, bits_at, BLOCK: tl.constexpr):
    """Of the weights above a threshold: how many, and their sum; and how many equal it."""
    i = tl.arange(0, BLOCK)
    more = 0
    equal = 0
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        w, bits = weights_and_bits(z, start + i, n, top, temperature)
        more += tl.sum((bits > bits_at).to(tl.int32), 0)
        equal += tl.sum(((bits == bits_at) & (start + i < n)).to(tl.int32), 0)
        mass += tl.where(bits > bits_at, w, 0.0).to(tl.float64)
    return more, tl.sum(mass, 0), equal


@triton.jit
def kept_weights(z, i, n, top, temperature, bits_at, n_equal, seen_equal, least):
    """Weights in f64, 0 where a cut dropped them; and how many equal the threshold.

    Kept are those above `bits_at`, the first `n_equal` that equal it, and of these the ones of at least `least`.
    """
    w, bits = weights_and_bits(z, i, n, top, temperature)
    equal = ((bits == bits_at) & (i < n)).to(tl.int32)
    kept = bits > bits_at
    if n_equal > 0:
        kept = kept | ((equal > 0) & (seen_equal + tl.cumsum(equal, 0) <= n_equal))
    return tl.where(kept & (w >= least), w, 0.0).to(tl.float64), tl.sum(equal, 0)


@triton.jit
def draw(z, n, top, temperature, bits_at, n_equal, least, uniform, BLOCK: tl.constexpr):
    """The first index whose cumulated kept weight exceeds `uniform` times all kept weight."""
    i = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float64)
    seen = 0
    for start in range(0, n, BLOCK):
        w, equal = kept_weights(z, start + i, n, top, temperature, bits_at, n_equal, seen, least)
        sums += w
        seen += equal
    target = uniform * tl.sum(sums, 0)
    before = target * 0.0
    seen = 0
    chosen = -1
    start = 0
    while (start < n) & (chosen < 0):
        w, equal = kept_weights(z, start + i, n, top, temperature, bits_at, n_equal, seen, least)
        upto = before + tl.sum(w, 0)
        if upto > target:
            first = tl.min(tl.where((before + tl.cumsum(w, 0) > target) & (w > 0.0), start + i, n), 0)
            last = tl.max(tl.where(w > 0.0, start + i, 0), 0)  # sums of another order may differ in the last bit
            chosen = tl.minimum(first, last)
        before = upto
        seen += equal
        start += BLOCK
    return chosen
