"""What the loader asks of a weight format. Must not know: any format, any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megakernel_runtime.weights.quantized import QuantizedTensor


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored tensor, before it is read."""

    file: Path
    shape: tuple[int, ...]
    n_bytes: int


class Checkpoint(Protocol):
    """All tensors of a model's files, under their foreign names."""

    @property
    def path(self) -> Path:
        """What to blame when a tensor is in none of the files."""
        ...

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every stored tensor."""
        ...

    def read(self, name: str) -> torch.Tensor | QuantizedTensor:
        """Return a tensor as it is stored: where possible a view of the mapped file. Raises WeightError."""
        ...
