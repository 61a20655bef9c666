"""The paged key/value cache: `n_pages` pages of `page_size` tokens each, in any order, shared by all sequences.

Must not know: who owns which page, attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernel_runtime.models.config import ModelConfig


class PagedKv:
    """Keys and values of all layers. A sequence is its page table: token t lies in page table[t // page_size]."""

    def __init__(self, config: ModelConfig, n_pages: int, page_size: int, dtype: torch.dtype) -> None:
        self.page_size = page_size
        # (layers, pages, page size, keys then values, KV heads, head_dim)
        self.data = torch.zeros(
            (config.n_layers, n_pages, page_size, 2, config.n_kv_heads, config.head_dim), dtype=dtype
        )

    def write(self, layer: int, pages: Sequence[int], start: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values, (count, KV heads, head_dim) each, of the tokens from `start` on."""
        tokens = torch.arange(start, start + len(k))
        table = torch.tensor(pages)
        self.data[layer, table[tokens // self.page_size], tokens % self.page_size] = torch.stack((k, v), dim=1)

    def read(self, layer: int, pages: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `length` tokens, (length, KV heads, head_dim) each."""
        used = torch.tensor(pages[: -(-length // self.page_size)])
        kv = self.data[layer, used].flatten(0, 1)[:length]  # (length, 2, KV heads, head_dim)
        return kv[:, 0], kv[:, 1]
