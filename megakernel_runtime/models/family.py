"""What a family of models is: how others spell its configuration and its weights. Data; the families are beside this.

The computation itself follows from `ModelConfig` alone. Must not know: tensors, file formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megakernel_runtime.models.fields import Fields

# Ours -> theirs; within a layer the key is the last part of our name (`layers.3.q` is "q" of layer 3).
HF_NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "norm_attn": "model.layers.{layer}.input_layernorm.weight",
    "q": "model.layers.{layer}.self_attn.q_proj.weight",
    "k": "model.layers.{layer}.self_attn.k_proj.weight",
    "v": "model.layers.{layer}.self_attn.v_proj.weight",
    "o": "model.layers.{layer}.self_attn.o_proj.weight",
    "norm_mlp": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
    "norm_final": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "norm_attn": "blk.{layer}.attn_norm.weight",
    "q": "blk.{layer}.attn_q.weight",
    "k": "blk.{layer}.attn_k.weight",
    "v": "blk.{layer}.attn_v.weight",
    "o": "blk.{layer}.attn_output.weight",
    "norm_mlp": "blk.{layer}.ffn_norm.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
    "norm_final": "output_norm.weight",
    "lm_head": "output.weight",
}

# What an absent key of config.json means, where transformers' configuration classes agree.
HF_DEFAULTS: Mapping[str, object] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}
# Keys that change the computation, each with the one value whose computation is built.
HF_ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "num_experts": None,
    "num_local_experts": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def no_window(_fields: Fields) -> None:
    """Every row sees its whole context, whatever config.json says."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family. `hf_*` is Hugging Face's spelling (config.json, safetensors), `gguf_*` llama.cpp's."""

    name: str  # ModelConfig.architecture
    hf_architecture: str  # config.json: the only entry of "architectures"
    gguf_architecture: str | None  # general.architecture; None: llama.cpp has no name of its own for it
    hf_names: Mapping[str, str] = field(default_factory=lambda: HF_NAMES)
    gguf_names: Mapping[str, str] = field(default_factory=lambda: GGUF_NAMES)
    hf_defaults: Mapping[str, object] = field(default_factory=lambda: HF_DEFAULTS)
    hf_only: Mapping[str, object] = field(default_factory=lambda: HF_ONLY)
    hf_window: Callable[[Fields], int | None] = no_window
    gguf_interleaved: frozenset[str] = frozenset()  # rows of a head lie (0, d/2, 1, d/2 + 1, ...) in GGUF files
    qkv_bias: bool = False
    qk_norm: bool = False

    def hf_name(self, name: str) -> str:
        """Return Hugging Face's name of our weight `name`."""
        return _spell(self.hf_names, name)

    def gguf_name(self, name: str) -> str:
        """Return llama.cpp's name of our weight `name`."""
        return _spell(self.gguf_names, name)


def _spell(names: Mapping[str, str], name: str) -> str:
    parts = name.split(".")  # "embed" or "layers.<i>.<leaf>"
    return names[parts[-1]].format(layer=parts[1] if len(parts) > 1 else "")


def layered_window(fields: Fields) -> int | None:
    """Return the window of a family whose layers may differ (Qwen); ConfigError where they do, for we hold one window.

    Follows transformers: `layer_types` rules, else the layers from `max_window_layers` on have the window.
    """
    window = fields.optional_integer("sliding_window", low=1) if fields.flag("use_sliding_window") else None
    n_layers = fields.integer("num_hidden_layers")
    kinds = {str(kind) for kind in fields.items("layer_types")}
    if not kinds:
        first = fields.integer("max_window_layers", low=0) if window else n_layers
        kinds = {"sliding_attention" if layer >= first else "full_attention" for layer in (0, n_layers - 1)}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or window is None:
        raise fields.error("layer_types" if fields.items("layer_types") else "max_window_layers", "one kind of layer")
    return window
