"""The operations of a step in plain torch: what the Triton kernels are compared with, and what runs without a GPU.

Written to be read, one row after the other where rows differ. Must not know: kernels, programs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megakernel_runtime.backends.graphs.ops import Tables
from megakernel_runtime.backends.graphs.shapes import Shape
from megakernel_runtime.backends.graphs.torch_sampler import TorchSampler
from megakernel_runtime.device_state.fields import Field
from megakernel_runtime.program.reference.untyped import integers


class TorchOps:
    """See ops.Ops."""

    def __init__(self, tables: Tables) -> None:
        self._t = tables
        self._sampler = TorchSampler(tables)

    def write_words(self, packet: Tensor) -> None:
        """See Ops."""
        self._t.state.arena.index_copy_(0, packet[0].long(), packet[1])

    def embed(self, shape: Shape, table: Tensor) -> Tensor:
        """See Ops."""
        t = self._t
        slots, tokens, positions, _ = t.frame.rows[: shape.rows].long().unbind(1)
        fields = t.state.fields[slots.clamp(min=0)].long()  # (T, FIELD_WORDS)
        live = (slots >= 0) & (fields[:, Field.LIVE] != 0)
        tokens = torch.where(tokens < 0, fields[:, Field.TOKEN], tokens).where(live, 0)
        positions = torch.where(positions < 0, fields[:, Field.POSITION], positions).where(live, 0)
        pages = t.state.pages[slots.clamp(min=0), positions // t.page_size].long()
        places = pages * t.page_size + positions % t.page_size
        t.positions[: shape.rows] = positions.where(live, -1)
        t.places[: shape.rows] = places.where(live, -1)
        return table[tokens].float() * live.unsqueeze(1)

    def add_norm(self, resid: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See Ops."""
        if delta is not None:
            resid.add_(delta)
        return self._norm(resid, weight).to(self._t.dtype)

    def norm_outs(self, shape: Shape, resid: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """See Ops."""
        outs = self._t.frame.outs[: shape.outs].long().clamp(min=0)
        return self._norm(resid[outs] + delta[outs], weight).to(self._t.dtype)

    def rope(self, qkv: Tensor, layer: int, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        """See Ops."""
        c, n = self._t.config, len(qkv)
        heads = qkv.view(n, -1, c.head_dim)
        q, k, v = heads[:, : c.n_heads], heads[:, c.n_heads : -c.n_kv_heads], heads[:, -c.n_kv_heads :]
        live = self._t.positions[:n] >= 0
        q.copy_(torch.where(live[:, None, None], self._turned(q, q_norm), q))
        places = self._t.places[:n][live].long()
        page, offset = places // self._t.page_size, places % self._t.page_size
        kv = torch.stack((self._turned(k, k_norm), v.float()), dim=1)[live]  # (live rows, 2, KV heads, head_dim)
        self._t.cache[layer][page, :, :, offset] = kv.to(self._t.dtype)

    def attend(self, shape: Shape, qkv: Tensor, layer: int) -> Tensor:
        """See Ops."""
        c = self._t.config
        q = qkv.view(len(qkv), -1, c.head_dim)[:, : c.n_heads]
        out = torch.zeros(len(qkv), c.n_heads, c.head_dim, dtype=self._t.dtype, device=qkv.device)
        rows = self._t.frame.rows[: shape.rows].cpu()
        positions = integers(self._t.positions[: shape.rows])
        for row, position in enumerate(positions):
            single = row < shape.spans and bool(rows[row, 3])
            if position >= 0 and single:
                out[row] = self._attend(q[row : row + 1], int(rows[row, 0]), position, layer)[0]
        for first, count, slot, start in self._t.frame.blocks[: shape.blocks].cpu().unbind(0):
            some = slice(int(first), int(first) + int(count))
            if count > 0:
                out[some] = self._attend(q[some], int(slot), int(start), layer)
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Ops."""
        gate, up = gate_up.float().chunk(2, dim=1)
        return (functional.silu(gate) * up).to(self._t.dtype)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """See Ops."""
        return functional.linear(x.float(), weight.float())

    def sample(self, shape: Shape, logits: Tensor) -> None:
        """See Ops."""
        self._sampler.sample(shape, logits)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._t.config.norm_eps) * weight.float()

    def _turned(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        """Return heads (T, n, head_dim), normed and turned to their rows' positions; anything for skipped rows."""
        positions = self._t.positions[: len(heads)].long().clamp(min=0)
        cos, sin = (table[positions].unsqueeze(1) for table in (self._t.cosines, self._t.sines))
        x = heads.float() if weight is None else self._norm(heads, weight)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(self._t.dtype)

    def _attend(self, q: Tensor, slot: int, start: int, layer: int) -> Tensor:
        """Return attention of neighbour rows (n, heads, head_dim) of one slot, the first of them at `start`."""
        c, n = self._t.config, len(q)
        length = start + n
        pages = self._t.state.pages[slot, : -(-length // self._t.page_size)].long()
        kv = self._t.cache[layer][pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        k, v = (x.float().repeat_interleave(c.group_size, dim=0) for x in kv)  # (heads, length, head_dim)
        tokens = torch.arange(length, device=q.device)
        distance = (start + torch.arange(n, device=q.device)).unsqueeze(1) - tokens
        seen = (distance >= 0) & (distance < (c.sliding_window or length))
        return functional.scaled_dot_product_attention(q.float().transpose(0, 1), k, v, seen).transpose(0, 1)
