"""What can be wrong with weight files. Must not know: who reads them."""

from __future__ import annotations

from megakernel_runtime.interface import ModelError


class WeightError(ModelError):
    """Weights that cannot be loaded: missing, surplus, misshapen or damaged. The message names file and tensor."""
