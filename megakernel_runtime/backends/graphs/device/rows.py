"""How a step begins and what is done to each row alone: words from the host, embedding, norm, gate.

Must not know: attention, sampling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megakernel_runtime.backends.graphs.device.slot import FIELD_WORDS, LIVE, POSITION, ROW_WORDS, TOKEN


@triton.jit(do_not_specialize=["n"])
def write_words_kernel(arena, packet, n, BLOCK: tl.constexpr):
    """arena[packet[i]] = packet[n + i] for all i < n; addresses are distinct."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(packet + i, mask=i < n, other=0)
    tl.store(arena + at, tl.load(packet + n + i, mask=i < n), mask=i < n)


@triton.jit
def embed_kernel(
    table,  # (V, H)
    fields,
    pages,  # (slots, MAX_PAGES)
    rows,
    resid,  # out (T, H) f32
    positions,  # out (T,), -1: the row is skipped
    places,  # out (T,): which token of the cache the row is, -1: none
    H: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find out what each row is, and look its token up."""
    t = tl.program_id(0)
    slot = tl.load(rows + t * ROW_WORDS)
    token = tl.load(rows + t * ROW_WORDS + 1)
    position = tl.load(rows + t * ROW_WORDS + 2)
    taken = slot >= 0
    slot = tl.maximum(slot, 0)
    mine = fields + slot * FIELD_WORDS
    live = taken & (tl.load(mine + LIVE) != 0)
    token = tl.where(token < 0, tl.load(mine + TOKEN), token)
    position = tl.where(position < 0, tl.load(mine + POSITION), position)
    if tl.program_id(1) == 0:
        page = tl.load(pages + slot * MAX_PAGES + position // PAGE, mask=live, other=0)
        tl.store(positions + t, tl.where(live, position, -1))
        tl.store(places + t, tl.where(live, page * PAGE + position % PAGE, -1))
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(table + token.to(tl.int64) * H + i, mask=i < tl.where(live, H, 0), other=0.0)
    tl.store(resid + t.to(tl.int64) * H + i, x.to(tl.float32), mask=i < H)


@triton.jit
def add_norm_kernel(
    resid,  # (T, H) f32
    delta,  # (T, H), what the last matrix adds; unused without ADD
    weight,  # (H,)
    outs,  # with GATHER: the row of `resid` that each output is made of, -1: none
    out,  # (T or outputs, H)
    EPS: tl.constexpr,
    H: tl.constexpr,
    ADD: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add delta to resid; out = resid / rms(resid) * weight. With GATHER the residual is not written: none reads it."""
    t = tl.program_id(0)
    row = t
    if GATHER:
        row = tl.maximum(tl.load(outs + t), 0)
    i = tl.arange(0, BLOCK)
    on = i < H
    at = row.to(tl.int64) * H + i
    x = tl.load(resid + at, mask=on, other=0.0)
    if ADD:
        x += tl.load(delta + at, mask=on, other=0.0).to(tl.float32)
        if not GATHER:
            tl.store(resid + at, x, mask=on)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / H + EPS)
    w = tl.load(weight + i, mask=on, other=0.0).to(tl.float32)
    tl.store(out + t.to(tl.int64) * H + i, (x * w).to(out.dtype.element_ty), mask=on)


@triton.jit
def silu_mul_kernel(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    """Out (T, F) = silu(gate) * up, which stand side by side in a row of (T, 2 F)."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + t * (2 * F) + i, mask=i < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * (2 * F) + F + i, mask=i < F, other=0.0).to(tl.float32)
    act = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + t * F + i, act.to(out.dtype.element_ty), mask=i < F)
