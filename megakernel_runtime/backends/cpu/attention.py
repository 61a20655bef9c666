"""The paged cache of the CPU backend, and attention over it: pages are gathered side by side, then one call a group.

What a group needs in all layers (scratch memory and its views, strides) is worked out once a step: in a decode step,
finding it again in every layer takes longer than attention itself. Must not know: weights, programs, slots.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from megakernel_runtime.backends.cpu.batch import Group
from megakernel_runtime.models.config import ModelConfig

# Takes all heads (T, heads + 2 * KV heads, head_dim) and a layer; returns the group's rows, (n, heads * head_dim).
Attend = Callable[[Tensor, int], Tensor]


class KvCache:
    """Keys and values of all layers, in pages."""

    def __init__(self, config: ModelConfig, n_pages: int, page_size: int, dtype: torch.dtype) -> None:
        self._config = config
        # (layers, tokens, keys then values of all KV heads, head_dim). Zero, for what a mask hides is multiplied too.
        self.data = _zeros((config.n_layers, n_pages * page_size, 2 * config.n_kv_heads, config.head_dim), dtype)
        self._tokens = [self.data[layer] for layer in range(config.n_layers)]
        self._pages = [tokens.view(n_pages, -1) for tokens in self._tokens]
        self._scratch = torch.empty(0, dtype=dtype)

    def write(self, layer: int, places: Tensor, heads: Tensor) -> None:
        """Store the keys and values that stand last in all heads (T, heads + 2 * KV heads, head_dim)."""
        self._tokens[layer].index_copy_(0, places, heads[:, self._config.n_heads :])

    def attend(self, group: Group) -> Attend:
        """Return what does the attention of `group`. Valid until the next call for a larger group."""
        c = self._config
        out = self._room(group.pages.shape[0])
        # (contexts, context, 2 * KV heads, head_dim)
        kv = out.view(group.n_contexts, -1, 2 * c.n_kv_heads, c.head_dim)[:, : group.context]
        k, v = kv[:, :, : c.n_kv_heads].transpose(1, 2), kv[:, :, c.n_kv_heads :].transpose(1, 2)
        n = group.rows.stop - group.rows.start
        row_stride = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
        start = group.rows.start * row_stride
        pages, index, mask = self._pages, group.pages, group.mask
        if not group.chunk:
            # The heads that share a KV head are the rows of one product: (n, KV heads, group, head_dim).
            shape = (n, c.n_kv_heads, c.group_size, c.head_dim)
            stride = (row_stride, c.group_size * c.head_dim, c.head_dim, 1)

            def decode(heads: Tensor, layer: int) -> Tensor:
                torch.index_select(pages[layer], 0, index, out=out)
                q = heads.as_strided(shape, stride, start)
                return functional.scaled_dot_product_attention(q, k, v, mask).reshape(n, -1)

            return decode
        # (KV heads, group, n, head_dim); the group shares keys and values without a copy.
        shape = (c.n_kv_heads, c.group_size, n, c.head_dim)
        stride = (c.group_size * c.head_dim, c.head_dim, row_stride, 1)
        k, v = (x[0].unsqueeze(1).expand(-1, c.group_size, -1, -1) for x in (k, v))

        def chunk(heads: Tensor, layer: int) -> Tensor:
            torch.index_select(pages[layer], 0, index, out=out)
            q = heads.as_strided(shape, stride, start)
            return functional.scaled_dot_product_attention(q, k, v, mask).permute(2, 0, 1, 3).reshape(n, -1)

        return chunk

    def _room(self, n_pages: int) -> Tensor:
        """Return scratch memory for so many pages, (pages, elements of a page)."""
        wanted = n_pages * self._pages[0].shape[1]
        if len(self._scratch) < wanted:
            self._scratch = torch.empty(wanted * 2, dtype=self._scratch.dtype)
        return self._scratch[:wanted].view(n_pages, -1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take memory only once they are written: fresh pages of the system, where torch.zeros writes."""
    n_bytes = dtype.itemsize
    for size in shape:
        n_bytes *= size
    return torch.frombuffer(mmap.mmap(-1, n_bytes), dtype=dtype).view(shape)
