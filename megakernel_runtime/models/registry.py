"""The families that can be served: one line each. Must not know: anything about a family but its object."""

from __future__ import annotations

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.models.family import Family
from megakernel_runtime.models.llama import LLAMA
from megakernel_runtime.models.mistral import MISTRAL
from megakernel_runtime.models.qwen2 import QWEN2
from megakernel_runtime.models.qwen3 import QWEN3

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
)


def family(config: ModelConfig) -> Family:
    """Return the family of a configuration; KeyError if its architecture was invented."""
    return {f.name: f for f in FAMILIES}[config.architecture]
