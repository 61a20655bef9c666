"""GGUF metadata of every family, written by llama.cpp's own package; Llama 3 scaling; refusals by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megakernel_runtime.models.config import ModelConfig, RopeScaling
from megakernel_runtime.models.fields import ConfigError
from megakernel_runtime.models.gguf_file import GgufError
from megakernel_runtime.models.read_config import read_config


@pytest.mark.parametrize(
    ("name", "architecture"), [("llama", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_family(tmp_path, tiny_model, write_gguf, name, architecture, tied):
    model = tiny_model(name, tie_word_embeddings=tied, rms_norm_eps=2**-10, head_dim=32)
    config = read_config(write_gguf(tmp_path / "m.gguf", model))
    assert config == ModelConfig(
        architecture=architecture,
        vocab_size=131,
        hidden_size=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        ffn_size=96,
        norm_eps=2**-10,
        rope_theta=10000.0,
        max_position=512,
        tied_embeddings=tied,
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_the_real_file(real_model_path):
    assert read_config(real_model_path) == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        ffn_size=1536,
        norm_eps=float(np.float32(1e-5)),
        rope_theta=100000.0,
        max_position=8192,
        tied_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_optional_keys(tmp_path, tiny_model, write_gguf):
    keys = {
        "attention.sliding_window": 32,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 2,
        "split.count": 1,
        "expert_count": 0,
    }
    config = read_config(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), keys=keys))
    assert config.sliding_window == 32
    assert config.rope_scaling == RopeScaling("linear", 4.0)
    assert config.eos_token_ids == (2, 7)


def transformers_factors(scaling: dict[str, float], theta: float, head_dim: int) -> np.ndarray:
    """Return by what transformers divides each frequency."""
    from transformers import LlamaConfig

    rope = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    config = LlamaConfig(head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).numpy()


@pytest.mark.parametrize(("factor", "theta", "head_dim"), [(8.0, 5e5, 128), (32.0, 5e5, 64), (1.0, 1e4, 64)])
def test_llama3_scaling_is_found_again_from_its_factors(tmp_path, tiny_model, write_gguf, factor, theta, head_dim):
    scaling = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model("llama", head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta})
    extra = {"rope_freqs.weight": transformers_factors(scaling, theta, head_dim)}
    config = read_config(write_gguf(tmp_path / "m.gguf", model, extra=extra))
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == pytest.approx(factor, rel=1e-5)
    assert (config.rope_scaling.low_freq_factor, config.rope_scaling.high_freq_factor) == (1.0, 4.0)
    assert config.rope_scaling.original_max_position == 8192


@pytest.mark.parametrize(
    "factors",
    [
        np.linspace(1, 8, 8, dtype=np.float32),
        np.ones(7, dtype=np.float32),
        np.zeros(8, dtype=np.float32),
        np.full(8, math.nan, dtype=np.float32),
        np.full(8, math.inf, dtype=np.float32),
        np.full(8, -1.0, dtype=np.float32),
    ],
    ids=["other rule", "too few", "zero", "nan", "inf", "negative"],
)
def test_other_frequency_factors_are_refused(tmp_path, tiny_model, write_gguf, factors):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), extra={"rope_freqs.weight": factors})
    with pytest.raises(ConfigError, match=r"m\.gguf: tensor 'rope_freqs\.weight'"):
        read_config(path)


@pytest.mark.parametrize("factors", [np.ones(8, dtype=np.float16), np.ones(1 << 15, dtype=np.float32)])
def test_frequency_factors_of_another_kind_are_refused(tmp_path, tiny_model, write_gguf, factors):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), extra={"rope_freqs.weight": factors})
    with pytest.raises(GgufError, match=r"m\.gguf: tensor 'rope_freqs\.weight' is F"):
        read_config(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "yarn"}, ("llama.rope.scaling.type", "yarn", "linear")),
        ({"expert_count": 8}, ("llama.expert_count", "8")),
        ({"attention.scale": 0.5}, ("llama.attention.scale", "0.5")),
        ({"logit_scale": 2.0}, ("llama.logit_scale", "2.0")),
        ({"split.count": 3}, ("split.count", "3", "--merge")),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, tiny_model, write_gguf, keys, expected):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), keys=keys)
    with pytest.raises(ConfigError) as error:
        read_config(path)
    for part in ("m.gguf", *expected):
        assert part in str(error.value)


def test_other_architectures_and_missing_tensors_are_refused_by_name(tmp_path):
    import gguf

    for architecture, expected in (
        ("gemma3", r"general\.architecture.*gemma3.*llama, qwen2, qwen3"),
        ("llama", "token_embd"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
        writer.add_embedding_length(64)
        writer.add_head_count(4)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ConfigError, match=expected):
            read_config(tmp_path / "m.gguf")
