"""The one description of a model that everything below the loaders reads. Standard library only.

Only `from_hf` and `from_gguf` (models/read_config.py) know foreign spellings. Must not know: tensors, devices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings as in Llama 3.x (`kind` "llama3") or "linear" (factor alone)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary GQA attention, SiLU-gated FFN. All sizes are element counts."""

    architecture: str  # "llama" | "mistral" | "qwen2" | "qwen3"
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope_theta: float
    max_position: int
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # a row sees the last `sliding_window` positions, itself included
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.n_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Our weight name -> shape, (rows out, columns in) for matrices; complete: a loader must fill exactly these."""
        h, q, kv, f = self.hidden_size, self.q_size, self.kv_size, self.ffn_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, h)}
        for i in range(self.n_layers):
            p = f"layers.{i}."
            shapes |= {p + "norm_attn": (h,), p + "q": (q, h), p + "k": (kv, h), p + "v": (kv, h), p + "o": (h, q)}
            if self.qkv_bias:
                shapes |= {p + "q_bias": (q,), p + "k_bias": (kv,), p + "v_bias": (kv,)}
            if self.qk_norm:
                shapes |= {p + "q_norm": (self.head_dim,), p + "k_norm": (self.head_dim,)}
            shapes |= {p + "norm_mlp": (h,), p + "gate": (f, h), p + "up": (f, h), p + "down": (h, f)}
        shapes["norm_final"] = (h,)
        if not self.tied_embeddings:
            shapes["lm_head"] = (self.vocab_size, h)
        return shapes
