"""From a model's files to its weights under our names: every name and shape is checked before the first byte is read.

Must not know: formats (the checkpoints do), families' names (models do), devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, overload

import torch

from megakernel_runtime.interface import Progress
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.models.gguf_file import is_gguf
from megakernel_runtime.models.registry import family
from megakernel_runtime.weights.checkpoint import Checkpoint
from megakernel_runtime.weights.errors import WeightError
from megakernel_runtime.weights.gguf_checkpoint import GgufCheckpoint
from megakernel_runtime.weights.quantized import QuantizedTensor
from megakernel_runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint

Weights = dict[str, torch.Tensor | QuantizedTensor]
# Stored by some files though they follow from the configuration: buffers of old transformers, Llama 3 scaling in GGUF.
_DERIVED = (".rotary_emb.inv_freq", "rope_freqs.weight")


@overload
def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    progress: Progress,
    keep_quantized: Literal[False] = False,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]: ...
@overload
def load_weights(
    path: Path, config: ModelConfig, *, progress: Progress, keep_quantized: bool, dtype: torch.dtype | None = None
) -> Weights: ...
def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    progress: Progress,
    keep_quantized: bool = False,
    dtype: torch.dtype | None = None,
) -> Weights | dict[str, torch.Tensor]:
    """Return the weights in `path` (Hugging Face directory or GGUF file): exactly the keys of `config.weight_shapes()`.

    Tensors are on the CPU, as stored and as views of the mapped file where `dtype` is None or the stored one, else
    converted. Quantised matrices become f32 (or `dtype`), or stay QuantizedTensor with `keep_quantized`. Rows of q and
    k are in the order of the rotate-half convention. `progress` counts bytes. Raises WeightError.
    """
    spelling = family(config)
    checkpoint: Checkpoint
    if is_gguf(path):
        checkpoint, spell, interleaved = GgufCheckpoint(path), spelling.gguf_name, spelling.gguf_interleaved
    else:
        checkpoint, spell, interleaved = SafetensorsCheckpoint(path), spelling.hf_name, frozenset[str]()
    shapes = config.weight_shapes()
    names = {name: spell(name) for name in shapes}
    tied_head = spell("lm_head") if config.tied_embeddings else None
    _check(checkpoint, {names[name]: shape for name, shape in shapes.items()}, optional=tied_head)
    if tied_head in checkpoint.entries:
        _check_tie(checkpoint, names["embed"], tied_head)
    total = sum(checkpoint.entries[foreign].n_bytes for foreign in names.values())
    weights: Weights = {}
    done = 0
    for name, foreign in names.items():
        tensor = checkpoint.read(foreign)
        if name.rpartition(".")[2] in interleaved:
            tensor = _rotate_half_order(tensor, config.head_dim)
        weights[name] = _finished(tensor, keep_quantized=keep_quantized, dtype=dtype)
        done += checkpoint.entries[foreign].n_bytes
        progress("weights", done, total)
    return weights


def _check(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], optional: str | None) -> None:
    """Raise WeightError unless the checkpoint holds exactly these tensors in these shapes, and perhaps `optional`."""
    for name, shape in expected.items():
        entry = checkpoint.entries.get(name)
        if entry is None:
            raise WeightError(f"{checkpoint.path}: tensor '{name}' is missing")
        if entry.shape != shape:
            raise WeightError(f"{entry.file}: tensor '{name}' has shape {entry.shape}, expected {shape}")
    for name, entry in checkpoint.entries.items():
        if name not in expected and not name.endswith(_DERIVED) and name != optional:
            raise WeightError(f"{entry.file}: tensor '{name}' is not part of the configured model")


def _check_tie(checkpoint: Checkpoint, embed: str, head: str) -> None:
    """Raise WeightError if a model with tied embeddings brings a head that differs from its embedding."""
    stored, tied = checkpoint.read(head), checkpoint.read(embed)
    same = isinstance(stored, torch.Tensor) and isinstance(tied, torch.Tensor) and torch.equal(stored, tied)
    if not same:
        file = checkpoint.entries[head].file
        raise WeightError(f"{file}: tensor '{head}' differs from '{embed}' though tie_word_embeddings is true")


def _rotate_half_order(tensor: torch.Tensor | QuantizedTensor, head_dim: int) -> torch.Tensor | QuantizedTensor:
    """Return the rows reordered within each head, from (0, d/2, 1, d/2 + 1, ...) to (0, 1, 2, ...)."""
    if isinstance(tensor, QuantizedTensor):
        return QuantizedTensor(tensor.kind, _deinterleave(tensor.blocks, head_dim))
    return _deinterleave(tensor, head_dim)


def _deinterleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    heads = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def _finished(
    tensor: torch.Tensor | QuantizedTensor, *, keep_quantized: bool, dtype: torch.dtype | None
) -> torch.Tensor | QuantizedTensor:
    if isinstance(tensor, QuantizedTensor):
        return tensor if keep_quantized else tensor.dequantize(dtype or torch.float32)
    return tensor if dtype is None else tensor.to(dtype)
