"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from megakernel_runtime.models.family import GGUF_NAMES, HF_DEFAULTS, HF_NAMES, Family, layered_window

QWEN2 = Family(
    name="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    gguf_architecture="qwen2",
    hf_names={**HF_NAMES} | {f"{x}_bias": f"model.layers.{{layer}}.self_attn.{x}_proj.bias" for x in "qkv"},
    gguf_names={**GGUF_NAMES} | {f"{x}_bias": f"blk.{{layer}}.attn_{x}.bias" for x in "qkv"},
    hf_defaults={
        **HF_DEFAULTS,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    hf_window=layered_window,
    qkv_bias=True,
)
