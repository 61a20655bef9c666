"""How large a CPU runtime is made: what the operator asked for, the rest from the model and the machine's memory.

Must not know: tensors, how memory is used.
"""

from __future__ import annotations

from megakernel_runtime.backends.cpu.machine import available_bytes
from megakernel_runtime.interface import Capacity, CapacityError, RuntimeSpec
from megakernel_runtime.models.config import ModelConfig

PAGE_SIZE_TOKENS = 16
MAX_SLOTS = 32
MAX_STEP_TOKENS = 128  # such a step takes about a tenth of a second for the default model on two cores
MAX_LEASE_STEPS = 16
MAX_PLANS_AHEAD = 2
KV_MEMORY_BYTES = 512 * 1024**2  # taken from the system only as pages are written

_WEIGHT_BITS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.0, "int4": 5.0}
_KV_BYTES = {"fp32": 4, "fp16": 4, "bf16": 2, "int8": 2, "int4": 2}


def choose_capacity(spec: RuntimeSpec, config: ModelConfig, weight_format: str) -> Capacity:
    """Return the sizes to load with. Raises CapacityError naming what was asked, what there is, and what to change."""
    page = spec.page_size_tokens or PAGE_SIZE_TOKENS
    n_slots = spec.max_slots or MAX_SLOTS
    token_bytes = config.n_layers * 2 * config.kv_size * _KV_BYTES[weight_format]
    if spec.max_model_len_tokens > config.max_position:
        raise CapacityError(
            f"max_model_len is {spec.max_model_len_tokens} tokens, but the model knows {config.max_position} "
            f"positions: choose fewer"
        )
    wanted_len = spec.max_model_len_tokens or config.max_position
    useful_pages = n_slots * -(-wanted_len // page)
    n_pages = spec.n_pages or min(useful_pages, (spec.kv_memory_bytes or KV_MEMORY_BYTES) // (token_bytes * page))
    max_len = wanted_len if spec.max_model_len_tokens else min(wanted_len, n_pages * page)
    if n_pages * page < max_len or n_pages < 1:
        raise CapacityError(
            f"a context of {wanted_len} tokens needs {wanted_len * token_bytes} bytes of KV memory, but there are "
            f"{n_pages * page * token_bytes}; raise kv_memory or pages, or lower max_model_len"
        )
    _check_memory(config, weight_format, n_pages * page * token_bytes)
    return Capacity(
        max_slots=n_slots,
        n_pages=n_pages,
        page_size_tokens=page,
        max_model_len_tokens=max_len,
        max_step_tokens=max(spec.max_step_tokens or MAX_STEP_TOKENS, n_slots),
        max_lease_steps=MAX_LEASE_STEPS,
        max_plans_ahead=MAX_PLANS_AHEAD,
        vocab_size=config.vocab_size,
    )


def _check_memory(config: ModelConfig, weight_format: str, kv_bytes: int) -> None:
    """Raise CapacityError if weights and cache cannot fit into what memory there is."""
    matrices = [shape for shape in config.weight_shapes().values() if len(shape) == 2]
    weight_bytes = round(sum(rows * columns for rows, columns in matrices) * _WEIGHT_BITS[weight_format] / 8)
    available = available_bytes()
    if available is not None and weight_bytes + kv_bytes > available:
        raise CapacityError(
            f"the model needs about {weight_bytes} bytes for {weight_format} weights and {kv_bytes} for its KV cache, "
            f"but {available} are available; choose a smaller weight_format or kv_memory, or a smaller model"
        )
