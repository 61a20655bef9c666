"""Shared by tests of programs and backends: Hugging Face models brought to our side, and plain ways to run them."""

from __future__ import annotations

from pathlib import Path

import torch

from megakernel_runtime.interface import PrefillRow, SamplingParams, SlotAdmit
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.program.reference.interpreter import Interpreter
from megakernel_runtime.program.slots import SlotTable
from megakernel_runtime.weights.load import load_weights

PAGE = 4
N_PAGES = 256

# Per case: family and what it changes of the tiny models' sizes. Between them: tied and untied embeddings, odd
# vocabularies, group sizes 1, 2, 3 and 4, head_dim apart from hidden / heads, all four families' extras.
CASES = {
    "llama": ("llama", {}),
    "llama-tied-gqa3": (
        "llama",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "vocab_size": 97,
        },
    ),
    "llama-scaled-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "mistral-window": ("mistral", {"sliding_window": 7, "intermediate_size": 80, "num_key_value_heads": 1}),
    "qwen2": (
        "qwen2",
        {"vocab_size": 139, "hidden_size": 40, "head_dim": 8, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "qwen3": ("qwen3", {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "intermediate_size": 72}),
}


def ignore_progress(phase: str, done: int, total: int) -> None:
    """Nobody watches."""


def ours(model, folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Save a Hugging Face model and load it as we do."""
    model.save_pretrained(folder)
    config = read_config(folder)
    return config, load_weights(folder, config, progress=ignore_progress)


def interpreter(config, weights, *, dtype=torch.float32, max_slots=8, page=PAGE, n_pages=N_PAGES, **kw):
    """An interpreter with its slots."""
    slots = SlotTable(max_slots, page, n_pages, page * n_pages)
    return Interpreter(config, weights, slots, n_pages=n_pages, page_size_tokens=page, dtype=dtype, **kw), slots


def admit(slots, index, tokens, pages, **sampling):
    """Admit a greedy sequence of which all is prompt."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 10_000} | sampling))
    slots.admit(SlotAdmit(index, tuple(tokens), len(tokens), sampling, pages=tuple(pages)))


def prefill(slots, index, start, count):
    """Return the segment of a prefill row."""
    segment = slots.prefill(PrefillRow(index, start, count))
    assert segment is not None
    return segment


def decode(slots, index):
    """Return the segment of a decode row."""
    segment = slots.decode(index)
    assert segment is not None
    return segment


def all_logits(config, weights, ids, **kw):
    """Logits of every position of one sequence, (len(ids), V): prefill in one chunk, sampling after each prefix."""
    machine, slots = interpreter(config, weights, **kw)
    rows = []
    for n in range(1, len(ids) + 1):
        admit(slots, 0, ids[:n], range(N_PAGES))
        machine.step([prefill(slots, 0, 0, n)])
        rows.append(machine.logits[0])
        slots.release(0)
    return torch.stack(rows)


def relative_error(ours_, theirs):
    """Largest over rows of |difference| / |theirs| (2-norms over the vocabulary)."""
    return ((ours_ - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max().item()
