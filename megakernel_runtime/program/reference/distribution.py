"""Distributions over the vocabulary as weights (R, V) f32, not normalised: shaped by temperature, cut, and drawn from.

Every row is treated alone. Among equal weights the smaller token id comes first. Must not know: slots, requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernel_runtime.program.reference.untyped import integers

# The nucleus is looked for among so many of the heaviest tokens first: sorting a whole vocabulary takes milliseconds.
_NUCLEUS_GUESS = 512


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((logits - their maximum) / temperature). `logits` (R, V), `temperature` (R, 1) > 0."""
    weights = logits - logits.amax(-1, keepdim=True)
    return weights.div_(temperature).exp_()


def keep_top_k(weights: Tensor, k: Tensor) -> Tensor:
    """Return which are the k[r] heaviest of row r, (R, V) bool. `k` is (R, 1), each in 1..V."""
    heaviest = weights.topk(int(k.max())).values  # (R, largest k), falling
    threshold = heaviest.gather(-1, k - 1)  # (R, 1): the lightest that is kept
    above = weights > threshold
    equal = weights == threshold
    n_equal_kept = k - above.sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) > n_equal_kept).any()):
        equal &= equal.cumsum(-1) <= n_equal_kept
    return above | equal


def keep_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest set of heaviest tokens that holds the share `top_p` of the row's weight, (R, V) bool.

    `top_p` is (R, 1), in [0, 1). At least one token is kept.
    """
    wanted = top_p.double() * weights.sum(-1, keepdim=True, dtype=torch.float64)  # (R, 1)
    n_vocab = weights.shape[-1]
    guess = min(_NUCLEUS_GUESS, n_vocab)
    while True:
        mass = weights.topk(guess).values.double().cumsum(-1)  # (R, guess), rising
        if guess == n_vocab or bool((mass[:, -1:] >= wanted).all()):
            break
        guess = min(guess * 16, n_vocab)
    n_kept = (mass < wanted).sum(-1, keepdim=True) + 1
    return keep_top_k(weights, n_kept.clamp(max=guess))


def keep_min_p(weights: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens weigh at least `min_p` (R, 1) times the heaviest of their row, (R, V) bool."""
    return weights >= min_p * weights.amax(-1, keepdim=True)


def draw(weights: Tensor, numbers: Sequence[float]) -> list[int]:
    """Return for each row the smallest id whose cumulated weight exceeds number * total. Numbers lie in [0, 1)."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(numbers, dtype=torch.float64, device=weights.device).unsqueeze(-1) * cumulated[:, -1:]
    return integers(torch.searchsorted(cumulated, targets, right=True).squeeze(-1))
