"""The compile-time constants of all kernels for one model: computed once, read by launches and by compile tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megakernel_runtime.backends.graphs.ops import Tables
from megakernel_runtime.backends.graphs.shapes import BLOCK_ROWS
from megakernel_runtime.interface import MAX_TOP_LOGPROBS

LEAST_SPAN_TOKENS = 128  # a shorter context is not split: merging would cost more than it saves
SPAN_UNITS = 256  # spans times KV heads of one long row: enough to fill a device
Values = Mapping[str, int | float | str | bool]


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


class Constants:
    """One mapping of constexpr arguments for each kernel, and what grids need."""

    def __init__(
        self,
        tables: Tables,
        *,
        list_room: int = 16384,  # candidates of one row that a list holds; more are looked at among all others
        vocab_block: int = 4096,  # logits of one program, where a row has several
        block: int = 8192,  # logits at once, where a row is one program
        short: int = 1024,  # candidates at once
    ) -> None:
        c = tables.config
        whole = power_of_two(c.vocab_size)
        self.row_block = 1024
        self.norm_warps = 4 if c.hidden_size <= 4096 else 8
        self.most_spans = min(max(power_of_two(SPAN_UNITS // c.n_kv_heads), 8), 64)
        self.list_room = min(list_room, whole)
        self.vocab_block = min(vocab_block, whole)
        self.parts = -(-c.vocab_size // self.vocab_block)
        self._set_rows(tables)
        self._set_attention(tables)
        self._set_sampler(tables, min(block, whole), min(short, whole))

    def _set_rows(self, tables: Tables) -> None:
        c = tables.config
        self.place: Values = {"PAGE": tables.page_size, "MAX_PAGES": tables.state.pages.shape[1]}
        self.embed: Values = {"H": c.hidden_size, "BLOCK": self.row_block, **self.place}
        self.norm: Values = {"EPS": c.norm_eps, "H": c.hidden_size, "BLOCK": power_of_two(c.hidden_size)}
        self.rope: Values = {
            "EPS": c.norm_eps,
            "NORM": c.qk_norm,
            "GROUP": c.group_size,
            "HEADS": c.n_kv_heads,
            "HALF": c.head_dim // 2,
            "PAGE": tables.page_size,
            "GROUP_BLOCK": power_of_two(c.group_size),
            "HALF_BLOCK": power_of_two(c.head_dim // 2),
        }

    def _set_attention(self, tables: Tables) -> None:
        c = tables.config
        d_block = max(16, power_of_two(c.head_dim))
        cut = {"WINDOW": c.sliding_window or 0, "TOKENS": 64 if d_block <= 128 else 32}
        common: Values = {
            "D": c.head_dim,
            "GROUP": c.group_size,
            "HEADS": c.n_kv_heads,
            "D_BLOCK": d_block,
            "PRECISION": "ieee" if tables.dtype == torch.float32 else "tf32",
            **self.place,
            **cut,
        }
        spans = {"LEAST": LEAST_SPAN_TOKENS, "MOST": self.most_spans}
        merge = {"SHARE": 4 if d_block <= 64 else 1, "GROUP_BLOCK": max(16, power_of_two(c.group_size))}
        self.plan: Values = {**cut, **spans, "BLOCK": power_of_two(tables.state.pages.shape[0])}
        self.spans: Values = {**common, **spans, **merge}
        self.blocks: Values = {**common, "ROWS": BLOCK_ROWS}

    def _set_sampler(self, tables: Tables, block: int, short: int) -> None:
        n_vocab, words = tables.config.vocab_size, {"WORDS": tables.state.mask_words}
        parts = {"PARTS": self.parts, "PARTS_BLOCK": power_of_two(self.parts)}
        row: Values = {"V": n_vocab, "ROOM": self.list_room, "BLOCK": block, "SHORT": short, **parts}
        self.adjust: Values = {"V": n_vocab, "BLOCK": self.vocab_block}
        self.mask: Values = {**self.adjust, **words}
        self.peaks: Values = {**self.adjust, "PARTS": self.parts}
        self.logprobs: Values = {**row, "MOST": MAX_TOP_LOGPROBS}
        self.choose: Values = {**row, **words}
