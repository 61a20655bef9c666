"""What torch leaves untyped, typed in one place. Must not know: anything else."""

from __future__ import annotations

from torch import Tensor


def integers(values: Tensor) -> list[int]:
    """Return the elements of an integer tensor (n,)."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def floats(values: Tensor) -> list[float]:
    """Return the elements of a floating-point tensor (n,)."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
