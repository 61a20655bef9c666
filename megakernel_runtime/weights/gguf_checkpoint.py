"""GGUF files as checkpoints: views of the mapped bytes. Must not know: names, models."""

from __future__ import annotations

from pathlib import Path

import torch

from megakernel_runtime.models.gguf_file import GgufError, GgufTensor, open_gguf
from megakernel_runtime.weights.checkpoint import Entry
from megakernel_runtime.weights.errors import WeightError
from megakernel_runtime.weights.quantized import QuantizedTensor

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint:
    """One open GGUF file."""

    def __init__(self, path: Path) -> None:
        """Open the file and check its table. Raises WeightError."""
        self.path = path
        try:
            self._file = open_gguf(path)
        except GgufError as error:
            raise WeightError(str(error)) from error
        self.entries = {t.name: Entry(path, t.shape, t.n_bytes) for t in self._file.tensors.values()}

    def read(self, name: str) -> torch.Tensor | QuantizedTensor:
        """Return a view of the file; for a vector a copy, so that norms alone do not keep the whole file mapped."""
        tensor = self._file.tensors[name]
        dtype = _PLAIN.get(tensor.type.name)
        if dtype is not None:
            values = self._bytes(tensor).view(dtype).view(tensor.shape)
            return values.clone() if values.dim() == 1 else values
        if len(tensor.shape) != 2:
            kind = tensor.type.name
            raise WeightError(f"{self.path}: tensor '{name}' of shape {tensor.shape} is {kind}; supported: matrices")
        blocks = self._bytes(tensor).view(tensor.shape[0], -1, tensor.type.n_bytes)
        return QuantizedTensor(tensor.type.name, blocks)

    def _bytes(self, tensor: GgufTensor) -> torch.Tensor:
        return torch.frombuffer(self._file.data, dtype=torch.uint8, count=tensor.n_bytes, offset=tensor.offset)
