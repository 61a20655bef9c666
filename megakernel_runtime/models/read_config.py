"""The only reader of foreign configurations: config.json of a Hugging Face directory, or the metadata of a GGUF file.

Everything that would change the computation and is not built is refused here, by name. Must not know: tensors, devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.models.family import Family
from megakernel_runtime.models.fields import ConfigError, Fields
from megakernel_runtime.models.gguf_file import GgufFile, is_gguf, open_gguf
from megakernel_runtime.models.registry import FAMILIES
from megakernel_runtime.models.rope import gguf_scaling, hf_rope

_MAX_JSON_BYTES = 64 * 1024 * 1024
_MAX_LAYERS = 4096
_MAX_WIDTH = 1 << 24  # elements; also of the vocabulary


def read_config(path: Path) -> ModelConfig:
    """Return the configuration of a Hugging Face directory or a GGUF file.

    Raises ConfigError for what is not supported, GgufError for a damaged file; both are ModelError.
    """
    if is_gguf(path):
        return from_gguf(open_gguf(path))
    source = path / "config.json"
    if not source.exists():
        raise ConfigError(f"{path}: no config.json; expected a Hugging Face model directory or a .gguf file")
    generation = path / "generation_config.json"
    return from_hf(Fields(str(source), read_json(source)), read_json(generation) if generation.exists() else {})


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file; ConfigError if it is none, or larger than 64 MB."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
        value: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return cast("dict[str, object]", value)


def from_hf(given: Fields, generation: Mapping[str, object]) -> ModelConfig:
    """Return the configuration that `given` (config.json) describes, with the defaults of transformers.

    End-of-sequence ids are those of generation_config.json where it has any, as in transformers' `generate`.
    """
    family = _hf_family(given)
    fields = Fields(given.source, {**family.hf_defaults, **given.values})
    fields.only(family.hf_only)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    max_position = fields.integer("max_position_embeddings")
    theta, scaling = hf_rope(fields, max_position)
    ends = fields if generation.get("eos_token_id") is None else Fields("generation_config.json", generation)
    return _checked(
        ModelConfig(
            architecture=family.name,
            vocab_size=fields.integer("vocab_size", high=_MAX_WIDTH),
            hidden_size=hidden,
            n_layers=fields.integer("num_hidden_layers", high=_MAX_LAYERS),
            n_heads=heads,
            n_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // heads),
            ffn_size=fields.integer("intermediate_size", high=_MAX_WIDTH),
            norm_eps=fields.number("rms_norm_eps"),
            rope_theta=theta,
            max_position=max_position,
            rope_scaling=scaling,
            tied_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            sliding_window=family.hf_window(fields),
            bos_token_id=fields.optional_integer("bos_token_id"),
            eos_token_ids=_token_ids(ends, "eos_token_id"),
        ),
        given.source,
    )


def _hf_family(given: Fields) -> Family:
    """Return the family that "architectures" names, or "model_type" in files without it."""
    names = given.items("architectures")
    if not names:
        family = next((f for f in FAMILIES if f.name == given.values.get("model_type")), None)
    else:
        family = next((f for f in FAMILIES if names == (f.hf_architecture,)), None)
    if family is None:
        raise given.error("architectures", ", ".join(f.hf_architecture for f in FAMILIES))
    return family


def from_gguf(file: GgufFile) -> ModelConfig:
    """Return the configuration that a GGUF file's metadata and tensor table describe."""
    fields = Fields(str(file.path), file.metadata)
    if fields.integer("split.count", 1, low=0) > 1:
        raise fields.error("split.count", "1; join the parts with `llama-gguf-split --merge` of llama.cpp")
    architecture = fields.text("general.architecture")
    family = next((f for f in FAMILIES if f.gguf_architecture == architecture), None)
    if family is None:
        known = (f.gguf_architecture for f in FAMILIES)
        raise fields.error("general.architecture", ", ".join(name for name in known if name))
    p = architecture + "."
    hidden, heads = fields.integer(p + "embedding_length"), fields.integer(p + "attention.head_count")
    head_dim = fields.integer(p + "attention.key_length", hidden // heads)
    fields.only(_gguf_only(p, head_dim))
    theta = fields.number(p + "rope.freq_base", 10000.0)
    return _checked(
        ModelConfig(
            architecture=family.name,
            vocab_size=_gguf_vocab_size(file, fields, family),
            hidden_size=hidden,
            n_layers=fields.integer(p + "block_count", high=_MAX_LAYERS),
            n_heads=heads,
            n_kv_heads=fields.integer(p + "attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_size=fields.integer(p + "feed_forward_length", high=_MAX_WIDTH),
            norm_eps=fields.number(p + "attention.layer_norm_rms_epsilon"),
            rope_theta=theta,
            max_position=fields.integer(p + "context_length"),
            rope_scaling=gguf_scaling(fields, p, theta, head_dim, file.floats("rope_freqs.weight")),
            tied_embeddings=family.gguf_name("lm_head") not in file.tensors,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            sliding_window=fields.optional_integer(p + "attention.sliding_window", low=1),
            bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_gguf_ends(fields),
        ),
        fields.source,
    )


def _gguf_only(p: str, head_dim: int) -> dict[str, object]:
    """Return the keys that change the computation, each with the only value that is built."""
    return {
        p + "attention.value_length": head_dim,
        p + "rope.dimension_count": head_dim,
        p + "rope.scale_linear": 1.0,
        p + "expert_count": 0,
        p + "attention.scale": None,
        p + "embedding_scale": None,
        p + "residual_scale": None,
        p + "logit_scale": None,
    }


def _gguf_vocab_size(file: GgufFile, fields: Fields, family: Family) -> int:
    """Return the rows of the embedding: not every file names the size, and all have this tensor."""
    name = family.gguf_name("embed")
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"{fields.source}: tensor '{name}' is missing")
    if tensor.shape[0] > _MAX_WIDTH:
        raise ConfigError(f"{fields.source}: tensor '{name}' has {tensor.shape[0]} rows; the limit is {_MAX_WIDTH}")
    return tensor.shape[0]


def _gguf_ends(fields: Fields) -> tuple[int, ...]:
    """Return the ids that end a sequence or a turn or a message, each once."""
    keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(fields.integer(key, low=0) for key in keys if key in fields.values))


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """Return the ids under `key`: one integer or a list of them."""
    ids = fields.items(key)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise fields.error(key, "a token id or a list of token ids")
    return cast("tuple[int, ...]", ids)


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """Return `config` unless its sizes contradict each other."""
    if config.n_heads % config.n_kv_heads:
        raise ConfigError(
            f"{source}: {config.n_heads} attention heads are no multiple of {config.n_kv_heads} key/value heads"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise ConfigError(f"{source}: head size {config.head_dim}; supported: even numbers from 2")
    if max(config.hidden_size, config.q_size) > _MAX_WIDTH:
        widest = max(config.hidden_size, config.q_size)
        raise ConfigError(f"{source}: a width of {widest} elements; the limit is {_MAX_WIDTH}")
    for token in (config.bos_token_id, *config.eos_token_ids):
        if token is not None and token >= config.vocab_size:
            raise ConfigError(f"{source}: special token id {token}; the vocabulary has {config.vocab_size} ids")
    return config
