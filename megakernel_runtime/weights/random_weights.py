"""Weights drawn from a seed, for benchmarks and tests of shapes whose files are not at hand. Must not know: files."""

from __future__ import annotations

import zlib

import torch

from megakernel_runtime.models.config import ModelConfig


def random_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return bf16 CPU tensors, exactly the keys of `config.weight_shapes()`, the same for the same seed.

    Matrices are normal with variance 1 / columns, those that write the residual stream smaller by its number of
    writers, so that activations stay near 1 at any depth; norms are near 1, biases near 0.
    """
    return {name: _draw(name, shape, config.n_layers, seed) for name, shape in config.weight_shapes().items()}


def _draw(name: str, shape: tuple[int, ...], n_layers: int, seed: int) -> torch.Tensor:
    # A stream for each tensor: its values do not depend on which others are drawn.
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
    leaf = name.rpartition(".")[2]
    if leaf.startswith("norm") or leaf.endswith("norm"):
        return values.mul_(0.1).add_(1.0)
    if leaf.endswith("bias"):
        return values.mul_(0.1)
    scale = shape[1] ** -0.5
    return values.mul_(scale * (2 * n_layers) ** -0.5 if leaf in {"o", "down"} else scale)
