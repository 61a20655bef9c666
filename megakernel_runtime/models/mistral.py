"""Mistral: Llama's computation with a sliding window in some releases (v0.1) and none in others (null).

llama.cpp publishes Mistral models as "llama", so that GGUF files of this family load as Llama.
"""

from __future__ import annotations

from megakernel_runtime.models.family import HF_DEFAULTS, HF_ONLY, Family
from megakernel_runtime.models.fields import Fields


def _window(fields: Fields) -> int | None:
    return fields.optional_integer("sliding_window", low=1)


MISTRAL = Family(
    name="mistral",
    hf_architecture="MistralForCausalLM",
    gguf_architecture=None,
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,  # of a file that leaves it out; null means none
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_only={**HF_ONLY, "attention_bias": False},
    hf_window=_window,
)
