"""Rotary position embeddings in the rotate-half convention: element i of a head turns with element i + head_dim / 2.

Source: Su et al., "RoFormer"; frequency scaling as in Llama 3.1. Must not know: heads' meaning, caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.models.rope import llama3_factors


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return how far each pair turns per position, in radians: (head_dim / 2,) f64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    factors = llama3_factors(scaling, config.rope_theta, config.head_dim)
    return frequencies / torch.tensor(factors, dtype=torch.float64)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return `x` turned to its positions, as it came. `x` (T, heads, head_dim), `positions` (T,), frequencies f64."""
    angles = torch.outer(positions.double(), frequencies)  # (T, head_dim / 2)
    cos, sin = angles.cos().to(x.dtype).unsqueeze(1), angles.sin().to(x.dtype).unsqueeze(1)  # (T, 1, head_dim / 2)
    first, second = x.chunk(2, dim=-1)  # (T, heads, head_dim / 2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
