"""The operations of a step as Triton kernels: grids, warps, scratch memory. Must not know: programs, plans.

Sizes of a step appear in grids only: a kernel is compiled once for a model, whatever the batch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megakernel_runtime.backends.graphs.device.attention import (
    attend_blocks_kernel,
    attend_spans_kernel,
    plan_spans_kernel,
)
from megakernel_runtime.backends.graphs.device.choose import choose_kernel
from megakernel_runtime.backends.graphs.device.constants import Constants
from megakernel_runtime.backends.graphs.device.rope import rope_kernel
from megakernel_runtime.backends.graphs.device.rows import (
    add_norm_kernel,
    embed_kernel,
    silu_mul_kernel,
    write_words_kernel,
)
from megakernel_runtime.backends.graphs.device.sample import (
    adjust_kernel,
    logprobs_kernel,
    mask_kernel,
    peaks_kernel,
)
from megakernel_runtime.backends.graphs.ops import Tables
from megakernel_runtime.backends.graphs.shapes import Shape


class TritonOps:
    """See ops.Ops. `n_sms` is how many multiprocessors attention spreads over."""

    def __init__(self, tables: Tables, n_sms: int, constants: Constants | None = None) -> None:
        self._t = tables
        self._c = constants or Constants(tables)
        c, state, config = self._c, tables.state, tables.config
        n_slots, device = len(state.fields), state.arena.device
        self._span_programs = max(1, -(-4 * n_sms // config.n_kv_heads))
        units = n_slots * c.most_spans

        def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._units = scratch(units, dtype=torch.int32)
        self._n_units = scratch(1, dtype=torch.int32)
        self._values = scratch(units, config.q_size)
        self._tops = scratch(units, config.n_heads)
        self._totals = scratch(units, config.n_heads)
        self._arrived = scratch(n_slots, config.n_kv_heads, dtype=torch.int32)
        self._peaks = scratch(n_slots, c.parts)
        self._peaks_at = scratch(n_slots, c.parts, dtype=torch.int32)
        self._list_z = scratch(n_slots, c.list_room)
        self._list_id = scratch(n_slots, c.list_room, dtype=torch.int32)

    def write_words(self, packet: Tensor) -> None:
        """See Ops."""
        n = packet.shape[1]
        write_words_kernel[triton.cdiv(n, 256),](self._t.state.arena, packet, n, BLOCK=256, num_warps=4)

    def embed(self, shape: Shape, table: Tensor) -> Tensor:
        """See Ops."""
        t, c = self._t, self._c
        hidden = t.config.hidden_size
        resid = torch.empty(shape.rows, hidden, dtype=torch.float32, device=table.device)
        grid = (shape.rows, triton.cdiv(hidden, c.row_block))
        embed_kernel[grid](
            table, t.state.fields, t.state.pages, t.frame.rows, resid, t.positions, t.places, **c.embed, num_warps=4
        )
        if shape.spans:
            plan_spans_kernel[1,](
                t.frame.rows, t.positions, self._units, self._n_units, shape.spans, **c.plan, num_warps=4
            )
        return resid

    def add_norm(self, resid: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See Ops."""
        out = torch.empty(resid.shape, dtype=self._t.dtype, device=resid.device)
        added = resid if delta is None else delta
        options = {"ADD": delta is not None, "GATHER": False, "num_warps": self._c.norm_warps}
        add_norm_kernel[len(resid),](resid, added, weight, self._t.frame.outs, out, **self._c.norm, **options)
        return out

    def norm_outs(self, shape: Shape, resid: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """See Ops."""
        out = torch.empty(shape.outs, resid.shape[1], dtype=self._t.dtype, device=resid.device)
        options = {"ADD": True, "GATHER": True, "num_warps": self._c.norm_warps}
        add_norm_kernel[shape.outs,](resid, delta, weight, self._t.frame.outs, out, **self._c.norm, **options)
        return out

    def rope(self, qkv: Tensor, layer: int, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        """See Ops."""
        t = self._t
        q_weight, k_weight = (t.cosines if weight is None else weight for weight in (q_norm, k_norm))
        rope_kernel[len(qkv), t.config.n_kv_heads](
            qkv,
            t.cache[layer],
            t.positions,
            t.places,
            t.cosines,
            t.sines,
            q_weight,
            k_weight,
            **self._c.rope,
            num_warps=2,
        )

    def attend(self, shape: Shape, qkv: Tensor, layer: int) -> Tensor:
        """See Ops."""
        t, c = self._t, self._c
        out = torch.empty(len(qkv), t.config.q_size, dtype=t.dtype, device=qkv.device)
        if shape.spans:
            grid = (min(self._span_programs, shape.spans * c.most_spans), t.config.n_kv_heads)
            attend_spans_kernel[grid](
                qkv,
                t.cache[layer],
                t.state.pages,
                t.frame.rows,
                t.positions,
                self._units,
                self._n_units,
                self._values,
                self._tops,
                self._totals,
                self._arrived,
                out,
                **c.spans,
                num_warps=4,
                num_stages=2,
            )
        if shape.blocks:
            attend_blocks_kernel[shape.blocks, t.config.n_heads](
                qkv, t.cache[layer], t.state.pages, t.frame.blocks, out, **c.blocks, num_warps=4, num_stages=2
            )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Ops."""
        n, width = gate_up.shape
        out = torch.empty(n, width // 2, dtype=self._t.dtype, device=gate_up.device)
        grid = (n, triton.cdiv(width // 2, self._c.row_block))
        silu_mul_kernel[grid](gate_up, out, F=width // 2, BLOCK=self._c.row_block, num_warps=4)
        return out

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """See Ops."""
        if x.dtype == torch.float32:
            return x @ weight.t()
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    def sample(self, shape: Shape, logits: Tensor) -> None:
        """See Ops."""
        t, s, c = self._t, self._t.state, self._c
        which = (logits, t.frame.outs, t.frame.rows)
        peaks, lists = (self._peaks, self._peaks_at), (self._list_z, self._list_id)
        grid = (shape.outs, c.parts)
        if shape.full:
            best = (t.log_sums, t.top_ids, t.top_logprobs)
            adjust_kernel[grid](*which, s.fields, s.counts, s.bias, **c.adjust, num_warps=4)
            peaks_kernel[grid](*which, s.fields, *peaks, **c.peaks, num_warps=4)
            logprobs_kernel[shape.outs,](*which, s.fields, *peaks, *best, *lists, **c.logprobs, num_warps=16)
            mask_kernel[grid](*which, s.fields, s.stops, s.allowed, **c.mask, num_warps=4)
        peaks_kernel[grid](*which, s.fields, *peaks, **c.peaks, num_warps=4)
        slots = (t.positions, s.fields, s.stops, s.counts)
        choose_kernel[shape.outs,](
            *which, *slots, *peaks, t.log_sums, t.result, *lists, **c.choose, FULL=shape.full, num_warps=16
        )
