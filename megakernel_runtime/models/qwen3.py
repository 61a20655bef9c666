"""Qwen3, dense: RMSNorm on each head of q and k, and a head size of its own."""

from __future__ import annotations

from megakernel_runtime.models.family import GGUF_NAMES, HF_DEFAULTS, HF_NAMES, HF_ONLY, Family, layered_window

QWEN3 = Family(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    gguf_architecture="qwen3",
    hf_names={**HF_NAMES} | {f"{x}_norm": f"model.layers.{{layer}}.self_attn.{x}_norm.weight" for x in "qk"},
    gguf_names={**GGUF_NAMES} | {f"{x}_norm": f"blk.{{layer}}.attn_{x}_norm.weight" for x in "qk"},
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    hf_only={**HF_ONLY, "attention_bias": False},
    hf_window=layered_window,
    qk_norm=True,
)
