"""Fixtures of all tests: the default model's file, and tiny random Hugging Face models of every family.

Must not know: how a model is served.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that needs the default model's weights."""
    for item in items:
        if "real_model_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_model)


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel"


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """Return the default model's GGUF file: named by MEGAKERNEL_TEST_MODEL, cached, or fetched now.

    Skips only where it is in neither place and MEGAKERNEL_OFFLINE forbids to fetch it.
    """
    named = os.environ.get("MEGAKERNEL_TEST_MODEL")
    path = Path(named) if named else _cache_dir() / "models" / DEFAULT_MODEL / DEFAULT_MODEL_FILE
    if path.is_file():
        return path
    if named:
        pytest.fail(f"MEGAKERNEL_TEST_MODEL names {named}, which is no file")
    if os.environ.get("MEGAKERNEL_OFFLINE"):
        pytest.skip(f"{DEFAULT_MODEL} is not cached and MEGAKERNEL_OFFLINE is set; run `megakernel pull {DEFAULT_MODEL}`")
    catalog = importlib.import_module("server.catalog")
    return catalog.resolve(DEFAULT_MODEL, cache_dir=_cache_dir(), progress=lambda *_: None)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Return a maker of random fp32 models with some thousand parameters: tiny_model(family, seed=0, **config)."""

    def make(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {
            "vocab_size": 131,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "initializer_range": 0.1,
        }
        config = AutoConfig.for_model(family, **(sizes | changes))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():  # biases and norms start at 0 and 1, which would hide their absence
                for name, parameter in model.named_parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
                    assert parameter.abs().sum() > 0, name
        return model

    return make
