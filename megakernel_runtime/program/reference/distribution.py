"""Distributions over the vocabulary as weights, not normalised: shaped by temperature, cut, and drawn from.

Among equal weights the smaller token id comes first. The cuts look at few candidates, found by bounds that cannot miss
any: sorting a whole vocabulary takes milliseconds. Must not know: slots, requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernel_runtime.program.reference.untyped import integers

_RUN = 64  # neighbours whose heaviest stands for them
_GUESS = 128  # tokens that mostly hold the nucleus


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((logits - their maximum) / temperature), (R, V) f32. `temperature` is (R, 1), > 0; one that f32 cannot
    tell from 0 leaves the most probable tokens only. Logits that are no numbers leave their row without any weight.
    """
    weights = logits - logits.amax(-1, keepdim=True)
    return weights.div_(temperature.clamp(min=torch.finfo(torch.float32).tiny)).exp_().nan_to_num_(nan=0.0)


def keep_top_k(weights: Tensor, k: int) -> Tensor:
    """Return which of `weights` (V,) are the `k` heaviest, (V,) bool. `k` is in 1..V."""
    return _keep(weights, _heaviest(weights, k).topk(k).values[-1], k)


def keep_top_p(weights: Tensor, top_p: float) -> Tensor:
    """Return the smallest set of heaviest `weights` (V,) that holds the share `top_p` of them all, (V,) bool.

    `top_p` is in [0, 1). At least one token is kept.
    """
    total = weights.sum(dtype=torch.float64)
    candidates = _heaviest(weights, min(_GUESS, len(weights)))
    if candidates.sum(dtype=torch.float64) < top_p * total:
        candidates = weights
    # All that weigh less than this hold less than the share 1 - top_p together: the others are enough.
    candidates = candidates[candidates >= (1.0 - top_p) * total / len(weights)]
    falling = candidates.sort(descending=True).values
    n_kept = int((falling.cumsum(0, dtype=torch.float64) < top_p * total).sum()) + 1
    n_kept = min(n_kept, len(falling))  # sums are rounded
    return _keep(weights, falling[n_kept - 1], n_kept)


def keep_min_p(weights: Tensor, min_p: float) -> Tensor:
    """Return which of `weights` (V,) are at least `min_p` times the heaviest, (V,) bool."""
    return weights >= min_p * weights.amax()


def draw(weights: Tensor, numbers: Sequence[float]) -> list[int]:
    """Return for each row of (R, V) the smallest id whose cumulated weight exceeds its number, in [0, 1), times all.

    Of a row without any weight, the last id: a prompt that a model cannot bear must not end the steps of all others.
    """
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(numbers, dtype=torch.float64, device=weights.device).unsqueeze(-1) * cumulated[:, -1:]
    chosen = torch.searchsorted(cumulated, targets, right=True).squeeze(-1)
    return integers(chosen.clamp_(max=weights.shape[-1] - 1))


def _heaviest(weights: Tensor, k: int) -> Tensor:
    """Return all of `weights` from some bound on, at least `k` of them."""
    if k > len(weights) // _RUN:
        return weights
    of_runs = weights[: len(weights) // _RUN * _RUN].view(-1, _RUN).amax(-1)
    return weights[weights >= of_runs.topk(k).values[-1]]  # k runs hold a weight of at least that


def _keep(weights: Tensor, lightest: Tensor, n: int) -> Tensor:
    """Return which of `weights` are the `n` heaviest, of which `lightest` is the last."""
    above = weights > lightest
    equal = weights == lightest
    n_equal = n - int(above.sum())
    if int(equal.sum()) > n_equal:
        equal &= equal.cumsum(0) <= n_equal
    return above | equal
