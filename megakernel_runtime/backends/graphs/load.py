"""From a `RuntimeSpec` to a loaded runtime on a GPU: sizes, weights, memory, captured steps.

Must not know: plans, how operations are done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megakernel_runtime.backends.graphs.executor import Captured, Executor
from megakernel_runtime.backends.graphs.model import GraphsModel
from megakernel_runtime.backends.graphs.ops import Ops, Tables, make_tables
from megakernel_runtime.backends.graphs.readback import HostReadback, Readback
from megakernel_runtime.backends.graphs.runtime import MOST_AHEAD_STEPS, GraphsRuntime
from megakernel_runtime.backends.graphs.shapes import Shape, captured_shapes, largest_shapes
from megakernel_runtime.backends.graphs.sizes import Memory, choose_capacity
from megakernel_runtime.backends.graphs.stepper import Stepper
from megakernel_runtime.interface import Capacity, CapacityError, DeviceInfo, Progress, RuntimeSpec
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.models.registry import family
from megakernel_runtime.program.slots import SlotTable
from megakernel_runtime.weights.load import load_weights
from megakernel_runtime.weights.random_weights import random_weights

FORMATS = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}
LEAST_CAPABILITY = (8, 0)
_RANDOM_SEED = 0
_HOST_MEMORY_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model runs. `n_sms` is 0 on the host, which runs the torch operations only: for tests."""

    device: torch.device
    name: str
    n_sms: int
    memory: Memory


def load_graphs(spec: RuntimeSpec, progress: Progress) -> GraphsRuntime:
    """Return a runtime on the current CUDA device, warm; "eager" captures nothing. Raises ModelError, CapacityError."""
    return load_on(cuda_device(spec.backend), spec, progress)


def load_on(device: Device, spec: RuntimeSpec, progress: Progress) -> GraphsRuntime:
    """Return a runtime on `device`, warm. Raises ModelError and CapacityError."""
    dtype = FORMATS.get(spec.weight_format)
    if dtype is None:
        raise CapacityError(f"weight format {spec.weight_format!r} is not for GPUs; choose {', '.join(FORMATS)}")
    path = Path(spec.model_path)
    config = read_config(path)
    capacity = choose_capacity(spec, config, dtype.itemsize, device.memory)
    if spec.random_weights:
        weights = random_weights(config, _RANDOM_SEED)
    else:
        weights = load_weights(path, config, progress=progress)
    try:
        return make_runtime(device, config, weights, capacity, dtype, progress, captures=spec.backend == "graphs")
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{device.name} ran out of memory while loading: lower kv_memory_bytes, n_pages, max_slots or "
            f"max_step_tokens ({error})"
        ) from error


def make_runtime(
    device: Device,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    capacity: Capacity,
    dtype: torch.dtype,
    progress: Progress,
    *,
    captures: bool,
) -> GraphsRuntime:
    """Return a runtime over weights that lie on any device."""
    return make_parts(device, config, weights, capacity, dtype, progress, captures=captures).runtime


@dataclass(frozen=True, slots=True)
class Parts:
    """A runtime, and what of it others may share while it has no plans."""

    runtime: GraphsRuntime
    tables: Tables
    slots: SlotTable
    step_bytes: int
    token_bytes: int


def make_parts(
    device: Device,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    capacity: Capacity,
    dtype: torch.dtype,
    progress: Progress,
    *,
    captures: bool,
) -> Parts:
    """Return a runtime over weights that lie on any device, and its parts."""
    with torch.inference_mode():
        tables = make_tables(config, capacity, device.device, dtype)
        ops = _ops(tables, device.n_sms)
        model = GraphsModel(tables, ops, weights, progress)
        stepper = _stepper(tables, ops, model, capacity, progress, captures=captures)
    info = DeviceInfo(
        backend="graphs" if captures else "eager",
        device=device.name,
        model=f"{family(config).hf_architecture} {_millions(config)}M",
        weight_bytes=model.weight_bytes,
        kv_bytes=tables.cache.nbytes,
    )
    page, n_pages = capacity.page_size_tokens, capacity.n_pages
    token_bytes = tables.cache.nbytes // (n_pages * page)
    slots = SlotTable(capacity.max_slots, page, n_pages, capacity.max_model_len_tokens)
    runtime = GraphsRuntime(
        stepper, capacity, info, step_bytes=model.weight_bytes, token_bytes=token_bytes, slots=slots
    )
    return Parts(runtime, tables, slots, model.weight_bytes, token_bytes)


def cuda_device(backend: str) -> Device:
    """Return the current CUDA device. CapacityError if there is none, or it is too old."""
    if not torch.cuda.is_available():
        raise CapacityError(f"backend {backend!r} needs a CUDA GPU that PyTorch sees, and there is none; choose cpu")
    index = torch.cuda.current_device()
    capability = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    if capability < LEAST_CAPABILITY:
        raise CapacityError(
            f"backend {backend!r} needs a GPU of compute capability 8.0 or more, and {name} has "
            f"{capability[0]}.{capability[1]}; choose cpu"
        )
    untyped: Any = torch.cuda
    n_sms = int(untyped.get_device_properties(index).multi_processor_count)
    free_bytes, _ = torch.cuda.mem_get_info(index)
    return Device(torch.device("cuda", index), f"{name}, {n_sms} SMs", n_sms, Memory(free_bytes, name))


def host_device() -> Device:
    """Return the host as a device."""
    return Device(torch.device("cpu"), "host", 0, Memory(_HOST_MEMORY_BYTES, "the host"))


def _ops(tables: Tables, n_sms: int) -> Ops:
    if n_sms:
        from megakernel_runtime.backends.graphs.device.ops import TritonOps

        return TritonOps(tables, n_sms)
    from megakernel_runtime.backends.graphs.torch_ops import TorchOps

    return TorchOps(tables)


def _stepper(
    tables: Tables, ops: Ops, model: GraphsModel, capacity: Capacity, progress: Progress, *, captures: bool
) -> Stepper:
    results = (tables.result, tables.top_ids, tables.top_logprobs)
    if tables.cache.device.type != "cuda":
        return Stepper(tables, ops, Executor(model, {}), HostReadback(*results), None)
    from megakernel_runtime.backends.graphs.cuda_capture import capture, warm_up
    from megakernel_runtime.backends.graphs.cuda_readback import CudaReadback

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    n_slots, n_tokens = capacity.max_slots, capacity.max_step_tokens
    warm_up(model, largest_shapes(n_slots, n_tokens), stream)
    captured: dict[Shape, Captured] = {}
    if captures:
        captured |= capture(model, captured_shapes(n_slots, n_tokens), stream, progress)
    readback: Readback = CudaReadback(*results, MOST_AHEAD_STEPS, stream)
    return Stepper(tables, ops, Executor(model, captured), readback, stream)


def _millions(config: ModelConfig) -> int:
    """Return the number of parameters in millions, rounded."""
    sizes = config.weight_shapes().values()
    return round(sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in sizes) / 1e6)
