"""Fixtures of all tests: the default model's file, tiny random Hugging Face models of every family, GGUF files of them.

Must not know: how a model is served.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Before torch is imported: OpenMP threads that spin for their peers make shared cores a hundred times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "7000")

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that needs the default model's weights."""
    for item in items:
        if "real_model_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_model)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU on a machine without one."""
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("no CUDA GPU that PyTorch sees")


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel"


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """Return the default model's GGUF file: named by MEGAKERNEL_TEST_MODEL, cached, or fetched now.

    Skips only where it is in neither place and MEGAKERNEL_TEST_OFFLINE forbids to fetch it.
    """
    named = os.environ.get("MEGAKERNEL_TEST_MODEL")
    path = Path(named) if named else _cache_dir() / "models" / DEFAULT_MODEL / DEFAULT_MODEL_FILE
    if path.is_file():
        return path
    if named:
        pytest.fail(f"MEGAKERNEL_TEST_MODEL names {named}, which is no file")
    if os.environ.get("MEGAKERNEL_TEST_OFFLINE"):
        pytest.skip(
            f"{DEFAULT_MODEL} is not cached and MEGAKERNEL_TEST_OFFLINE is set; run `megakernel pull {DEFAULT_MODEL}`"
        )
    catalog = importlib.import_module("server.catalog")
    return catalog.resolve(DEFAULT_MODEL, cache_dir=_cache_dir(), progress=lambda *_, **__: None)


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


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Return a writer of GGUF files: write_gguf(path, model, kind="F32", embed_kind=..., keys={...}, extra={...}).

    Names come from llama.cpp's own tables, rows are reordered as its converter does, matrices are quantised to `kind`.
    `keys` are further metadata (after the architecture's prefix), `extra` further F32 tensors.
    """

    def write(
        path: Path,
        model: PreTrainedModel,
        *,
        kind: str = "F32",
        embed_kind: str | None = None,
        keys: dict[str, float | str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Path:
        import gguf

        c = model.config
        arch = {"mistral": "llama"}.get(c.model_type, c.model_type)
        writer = gguf.GGUFWriter(path, arch)
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        writer.add_block_count(c.num_hidden_layers)
        writer.add_context_length(c.max_position_embeddings)
        writer.add_embedding_length(c.hidden_size)
        writer.add_feed_forward_length(c.intermediate_size)
        writer.add_head_count(c.num_attention_heads)
        writer.add_head_count_kv(c.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
        writer.add_bos_token_id(c.bos_token_id)
        writer.add_eos_token_id(c.eos_token_id)
        writer.add_token_list([f"<{i}>" for i in range(c.vocab_size)])
        for key, value in (keys or {}).items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(
                f"{arch}.{key}" if "general." not in key and "tokenizer." not in key and "split." not in key else key,
                value,
            )
        architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
        names = gguf.get_tensor_name_map(architecture, c.num_hidden_layers)
        for hf_name, parameter in model.named_parameters():
            values = parameter.detach().numpy()
            if arch == "llama" and hf_name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = values.shape[0] // head_dim
                values = values.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
            stem, _, suffix = hf_name.rpartition(".")
            chosen = "F32" if values.ndim == 1 else (embed_kind or kind) if "embed" in stem else kind
            quantised = gguf.GGMLQuantizationType[chosen]
            writer.add_tensor(
                f"{names.get_name(stem)}.{suffix}", gguf.quants.quantize(values, quantised), raw_dtype=quantised
            )
        for name, values in (extra or {}).items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
