"""Arrays of 32 bit words on the host, as numpy and as torch see them. Must not know: anything else."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.int32]


def tensor_of(words: Words) -> Tensor:
    """Return a CPU tensor over the same memory."""
    return torch.from_numpy(words)  # pyright: ignore[reportUnknownMemberType]


def words_of(tensor: Tensor) -> Words:
    """Return an array over the same memory as a CPU tensor of i32."""
    return tensor.numpy()
