"""Llama: Llama 2 and 3.x, SmolLM2, TinyLlama and all others that publish themselves as LlamaForCausalLM."""

from __future__ import annotations

from megakernel_runtime.models.family import HF_DEFAULTS, HF_ONLY, Family

LLAMA = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    gguf_architecture="llama",
    hf_defaults={**HF_DEFAULTS, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    hf_only={**HF_ONLY, "attention_bias": False},
    gguf_interleaved=frozenset({"q", "k"}),  # convert_hf_to_gguf.py of llama.cpp, LlamaModel.permute
)
