"""The small weights as the kernel reads them, and the tables of rotary angles. Must not know: tapes, launches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.reference.rope import inverse_frequencies

Weights = Mapping[str, torch.Tensor]


def biases(config: ModelConfig, weights: Weights, device: torch.device) -> torch.Tensor:
    """Return (layers, q + 2 kv) bf16, or one word where the model has none."""
    if not config.qkv_bias:
        return torch.zeros(8, dtype=torch.bfloat16, device=device)
    names = [f"layers.{i}.{leaf}_bias" for i in range(config.n_layers) for leaf in "qkv"]
    return torch.cat([weights[name].to(device=device, dtype=torch.bfloat16) for name in names])


def qk_norms(config: ModelConfig, weights: Weights, device: torch.device) -> torch.Tensor:
    """Return (layers, 2, head_dim) bf16, queries' first, or one word where the model has none."""
    if not config.qk_norm:
        return torch.zeros(8, dtype=torch.bfloat16, device=device)
    names = [f"layers.{i}.{leaf}_norm" for i in range(config.n_layers) for leaf in "qk"]
    return _stack(weights, names, device)


def rope_tables(config: ModelConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, each (length, head_dim / 2) fp32, of every position's angles."""
    positions = torch.arange(length, dtype=torch.float64)
    angles = positions[:, None] * inverse_frequencies(config).to(torch.float64)
    return angles.cos().float().to(device).contiguous(), angles.sin().float().to(device).contiguous()


def _stack(weights: Weights, names: list[str], device: torch.device) -> torch.Tensor:
    return torch.stack([weights[name].to(device=device, dtype=torch.bfloat16) for name in names]).contiguous()
