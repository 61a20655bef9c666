"""Rotary embedding, QK-norm and the write to the KV pages. Must not know: attention.

Pages of one layer are (pages, keys then values, KV heads, tokens, head_dim).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def head_norm(first, second, weight, i, EPS: tl.constexpr, HALF: tl.constexpr):
    """Both halves of heads (heads, half) over their common rms, times the weight."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    inverse = tl.rsqrt(squares / (2 * HALF) + EPS)[:, None]
    on = i < HALF
    first = first * inverse * tl.load(weight + i, mask=on, other=0.0).to(tl.float32)[None, :]
    second = second * inverse * tl.load(weight + HALF + i, mask=on, other=0.0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def turned(source, at, on, weight, cos, sin, i, NORM: tl.constexpr, EPS: tl.constexpr, HALF: tl.constexpr):
    """Heads (heads, half) read from source + at, normed with NORM, turned: both halves, f32."""
    first = tl.load(source + at, mask=on, other=0.0).to(tl.float32)
    second = tl.load(source + at + HALF, mask=on, other=0.0).to(tl.float32)
    if NORM:
        first, second = head_norm(first, second, weight, i, EPS, HALF)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def rope_kernel(
    qkv,  # (T, WIDTH): queries are turned in place
    cache,  # pages of this layer: keys and values go there
    positions,
    places,
    cosines,  # (positions, half) f32
    sines,
    q_norm,
    k_norm,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # KV heads
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """One row's KV head and the query heads that share it."""
    t = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(positions + t)
    if position >= 0:
        D: tl.constexpr = 2 * HALF
        row = qkv + t.to(tl.int64) * ((GROUP + 2) * HEADS * D)
        i = tl.arange(0, HALF_BLOCK)
        on = i < HALF
        cos = tl.load(cosines + position * HALF + i, mask=on, other=0.0)[None, :]
        sin = tl.load(sines + position * HALF + i, mask=on, other=0.0)[None, :]
        g = tl.arange(0, GROUP_BLOCK)
        at = (head * GROUP + g)[:, None] * D + i[None, :]
        of_group = (g < GROUP)[:, None] & on[None, :]
        first, second = turned(row, at, of_group, q_norm, cos, sin, i, NORM, EPS, HALF)
        tl.store(row + at, first.to(qkv.dtype.element_ty), mask=of_group)
        tl.store(row + at + HALF, second.to(qkv.dtype.element_ty), mask=of_group)
        place = tl.load(places + t)
        to = ((place // PAGE).to(tl.int64) * (2 * HEADS) + head) * (PAGE * D) + (place % PAGE) * D
        at = ((GROUP * HEADS + head) * D + i)[None, :]
        first, second = turned(row, at, on[None, :], k_norm, cos, sin, i, NORM, EPS, HALF)
        kept = cache + to + i[None, :]
        tl.store(kept, first.to(cache.dtype.element_ty), mask=on[None, :])
        tl.store(kept + HALF, second.to(cache.dtype.element_ty), mask=on[None, :])
        at += HEADS * D
        kept += HEADS * PAGE * D
        tl.store(kept, tl.load(row + at, mask=on[None, :]).to(cache.dtype.element_ty), mask=on[None, :])
        tl.store(kept + HALF, tl.load(row + at + HALF, mask=on[None, :]).to(cache.dtype.element_ty), mask=on[None, :])
