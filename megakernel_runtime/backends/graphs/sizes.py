"""How large a runtime on a GPU is made: what the operator asked for, the rest from the model and the device's memory.

Standard library only. Must not know: tensors, how memory is used.
"""

from __future__ import annotations

from dataclasses import dataclass

from megakernel_runtime.device_state.fields import FIELD_WORDS
from megakernel_runtime.interface import Capacity, CapacityError, RuntimeSpec
from megakernel_runtime.models.config import ModelConfig

PAGE_SIZE_TOKENS = 32
MAX_SLOTS = 128
MAX_STEP_TOKENS = 2048
MAX_LEASE_STEPS = 32
MAX_PLANS_AHEAD = 2
MEMORY_SHARE = 0.9  # of what is free before loading; the rest is for the driver, graphs and fragmentation
ACTIVATION_COPIES = 4  # of the widest activation that may live at once, generously


@dataclass(frozen=True, slots=True)
class Memory:
    """What a device has free, in bytes, before anything is loaded."""

    free_bytes: int
    name: str


def choose_capacity(spec: RuntimeSpec, config: ModelConfig, element_bytes: int, memory: Memory) -> Capacity:
    """Return the sizes to load with. Raises CapacityError naming what was asked, what there is, and what to change."""
    page = spec.page_size_tokens or PAGE_SIZE_TOKENS
    n_slots = spec.max_slots or MAX_SLOTS
    max_step_tokens = max(spec.max_step_tokens or MAX_STEP_TOKENS, n_slots)
    if page & (page - 1):
        raise CapacityError(f"page_size_tokens is {page}; it must be a power of two")
    if spec.max_model_len_tokens > config.max_position:
        raise CapacityError(
            f"max_model_len_tokens is {spec.max_model_len_tokens}, but the model knows "
            f"{config.max_position} positions: choose fewer"
        )
    wanted_len = spec.max_model_len_tokens or config.max_position
    page_bytes = config.n_layers * 2 * config.kv_size * element_bytes * page
    fixed_bytes = weight_bytes(config, element_bytes) + _working_bytes(config, n_slots, max_step_tokens, wanted_len)
    left_bytes = int(memory.free_bytes * MEMORY_SHARE) - fixed_bytes
    useful_pages = n_slots * -(-wanted_len // page)
    n_pages = spec.n_pages or min(useful_pages, (spec.kv_memory_bytes or max(left_bytes, 0)) // page_bytes)
    if n_pages * page_bytes > left_bytes:
        raise CapacityError(
            f"the model needs about {fixed_bytes} bytes and {n_pages * page_bytes} for its KV cache, but {memory.name} "
            f"has {memory.free_bytes} free: lower kv_memory_bytes, n_pages or max_slots, or choose a smaller model"
        )
    max_len = wanted_len if spec.max_model_len_tokens else min(wanted_len, n_pages * page)
    if n_pages < 1 or n_pages * page < max_len:
        raise CapacityError(
            f"a context of {wanted_len} tokens needs {-(-wanted_len // page) * page_bytes} bytes of KV memory, but "
            f"there are {n_pages * page_bytes}: raise kv_memory_bytes or n_pages, or lower max_model_len_tokens"
        )
    return Capacity(
        max_slots=n_slots,
        n_pages=n_pages,
        page_size_tokens=page,
        max_model_len_tokens=max_len,
        max_step_tokens=max_step_tokens,
        max_lease_steps=MAX_LEASE_STEPS,
        max_plans_ahead=MAX_PLANS_AHEAD,
        vocab_size=config.vocab_size,
    )


def weight_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Return what all weights of a model take."""
    shapes = config.weight_shapes().values()
    return sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes) * element_bytes


def _working_bytes(config: ModelConfig, n_slots: int, n_rows: int, max_len: int) -> int:
    """Return about what slots, rotation tables and the activations of the largest step take."""
    slots = n_slots * 4 * (FIELD_WORDS + 3 * config.vocab_size)  # counts, bias, logits
    spans = n_slots * 64 * (config.q_size + 2 * config.n_heads) * 4
    tables = max_len * config.head_dim * 4
    activations = n_rows * max(2 * config.ffn_size, config.q_size + 2 * config.kv_size) * 4 * ACTIVATION_COPIES
    return slots + spans + tables + activations
