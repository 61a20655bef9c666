"""The meaning of ATTEND and COMBINE: attention over spans of the context, and the merge of what the spans gave.

A span's partial is (values, largest score, sum of exponentials), all relative to its own largest score, so that spans
are computed by anyone in any order. Must not know: pages, programs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, first: int, window: int | None) -> Tensor:
    """Return the partials of one span for all rows, (T, heads, head_dim + 2) f32.

    `q` (T, heads, head_dim); `k`, `v` (span, KV heads, head_dim) of the tokens from `first` on; `positions` (T,). A row
    sees tokens up to its own position, and no more than the last `window`. A span of which it sees none sums to 0.
    """
    n_rows, n_heads, head_dim = q.shape
    span, n_kv_heads, _ = k.shape
    grouped = q.float().view(n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    scores = torch.einsum("tngd,snd->tngs", grouped, k.float()) * head_dim**-0.5
    tokens = torch.arange(first, first + span)
    visible = tokens <= positions.unsqueeze(1)  # (T, span)
    if window is not None:
        visible &= tokens > positions.unsqueeze(1) - window
    scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
    largest = scores.amax(-1, keepdim=True)  # (T, KV heads, group, 1)
    weights = (scores - largest.clamp(min=torch.finfo(scores.dtype).min)).exp()  # -inf - -inf would be undefined
    values = torch.einsum("tngs,snd->tngd", weights, v.float())
    return torch.cat((values, largest, weights.sum(-1, keepdim=True)), dim=-1).flatten(1, 2)


def combine(partials: Tensor) -> Tensor:
    """Return the attention output of one row, (heads, head_dim) f32, from its partials (spans, heads, head_dim + 2)."""
    values, largest, sums = partials[..., :-2], partials[..., -2:-1], partials[..., -1:]
    factors = (largest - largest.amax(0)).exp()  # 0 for a span of which the row saw nothing
    return (factors * values).sum(0) / (factors * sums).sum(0)
