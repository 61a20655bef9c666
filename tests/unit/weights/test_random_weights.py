"""Random weights: complete, bf16, the same for the same seed, and of a size at which activations neither die nor burst."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.models.registry import family
from megakernel_runtime.weights.random_weights import random_weights

CONFIG = ModelConfig("qwen3", 131, 64, 2, 4, 2, 32, 96, 1e-6, 1e4, 512, qkv_bias=True, qk_norm=True)


def test_every_weight_is_there_in_bf16():
    weights = random_weights(CONFIG, 1)
    assert {name: tuple(value.shape) for name, value in weights.items()} == CONFIG.weight_shapes()
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_the_seed_decides():
    first, again, other = (random_weights(CONFIG, seed) for seed in (1, 1, 2))
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert not torch.equal(value, other[name]), name
    assert not torch.equal(first["layers.0.q"], first["layers.1.q"])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_of_a_deep_model_have_a_sensible_spread(tmp_path, tiny_model, name):
    tiny_model(name, num_hidden_layers=24).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    weights = {family(config).hf_name(key): value.float() for key, value in random_weights(config, 3).items()}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(torch.arange(64)[None]).logits
    assert 0.3 < logits.std() < 3
