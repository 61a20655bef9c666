"""From a `RuntimeSpec` to the loaded runtime `megakernel`. Must not know: plans, steps."""

# pyright: basic
# torch.cuda is untyped.

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megakernel_runtime.backends.graphs.load import Device, Parts, cuda_device, make_parts
from megakernel_runtime.backends.graphs.sizes import choose_capacity, weight_bytes
from megakernel_runtime.backends.megakernel.accounts import Accounts
from megakernel_runtime.backends.megakernel.resident import ResidentRunner
from megakernel_runtime.backends.megakernel.runtime import MegakernelRuntime
from megakernel_runtime.interface import Capacity, CapacityError, Progress, RuntimeSpec
from megakernel_runtime.kernels import words as w
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.program.builder import build_program
from megakernel_runtime.program.placement import place
from megakernel_runtime.resident.layout import shape_of, why_not
from megakernel_runtime.resident.memory import DeviceMemory
from megakernel_runtime.resident.session import Session
from megakernel_runtime.weights.load import load_weights
from megakernel_runtime.weights.random_weights import random_weights

ROWS = 8  # of a step of the kernel; larger steps run on the graphs backend
# Whether the kernel takes chunks of prompts. Without them it decodes by a tenth faster, for its code fits the SMs'
# instruction caches better; and graphs are faster at long prompts anyway. docs/decisions/0004-two-executors.md
CHUNKS = False
CAPABILITY = (9, 0)
_RANDOM_SEED = 0


def load_megakernel(spec: RuntimeSpec, progress: Progress) -> MegakernelRuntime:
    """Return a runtime on the current CUDA device, its kernel compiled. Raises ModelError and CapacityError."""
    device = megakernel_device()
    path = Path(spec.model_path)
    config = check_model(spec)
    # the tape is a second copy of the weights
    memory = replace(device.memory, free_bytes=device.memory.free_bytes - weight_bytes(config, 2))
    capacity = choose_capacity(spec, config, 2, memory)
    weights = (
        random_weights(config, _RANDOM_SEED) if spec.random_weights else load_weights(path, config, progress=progress)
    )
    try:
        return make_megakernel(device, config, weights, capacity, progress, spec)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{device.name} ran out of memory while loading: lower kv_memory_bytes, n_pages or max_slots ({error})"
        ) from error


def check_model(spec: RuntimeSpec) -> ModelConfig:
    """Return the model's configuration. CapacityError, naming what to choose instead, if the kernel cannot run it."""
    config = read_config(Path(spec.model_path))
    if (reason := why_not(config)) is not None:
        raise CapacityError(f"the resident kernel cannot run this model: {reason}; choose backend graphs")
    if spec.weight_format not in ("auto", "bf16"):
        raise CapacityError(f"weight format {spec.weight_format!r} is not for the resident kernel; choose auto or bf16")
    return config


def megakernel_device() -> Device:
    """Return the current CUDA device. CapacityError if the resident kernel does not run on it."""
    device = cuda_device("megakernel")
    capability = torch.cuda.get_device_capability(device.device)
    if capability != CAPABILITY:
        raise CapacityError(
            f"the resident kernel is made for compute capability 9.0 (H100, H200), and {device.name} has "
            f"{capability[0]}.{capability[1]}; choose backend graphs"
        )
    return device


def make_megakernel(
    device: Device,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    capacity: Capacity,
    progress: Progress,
    spec: RuntimeSpec,
    *,
    drops: bool = False,
    chunks: bool = CHUNKS,
) -> MegakernelRuntime:
    """Return a runtime over weights that lie anywhere. `drops`: see `KernelShape`."""
    parts = make_parts(device, config, weights, capacity, torch.bfloat16, progress, captures=True)
    session = _session(device, config, weights, capacity, parts, progress, spec, drops=drops, chunks=chunks)
    runner = ResidentRunner(session, parts.slots, parts.tables.state)
    info = replace(parts.runtime.info, backend="megakernel")
    return MegakernelRuntime(
        session,
        runner,
        parts.runtime,
        capacity,
        info,
        Accounts(session, time.monotonic_ns()),
        max_rows=session.memory.shape.rows,
        chunks=chunks,
        step_bytes=session.memory.tape_bytes,
        token_bytes=parts.token_bytes,
        kernels_per_step=len(build_program(config).instructions),
    )


def _session(
    device: Device,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    capacity: Capacity,
    parts: Parts,
    progress: Progress,
    spec: RuntimeSpec,
    *,
    drops: bool,
    chunks: bool,
) -> Session:
    grid = device.n_sms - spec.sm_reserve
    if grid < 1:
        raise CapacityError(f"{spec.sm_reserve} SMs are reserved of {device.n_sms}: none are left for the kernel")
    shape = shape_of(
        config,
        rows=ROWS,
        grid=grid,
        slots=capacity.max_slots,
        n_pages=capacity.n_pages,
        max_len=capacity.max_model_len_tokens,
        page=capacity.page_size_tokens,
        by_sm=spec.sm_reserve == 0,
        drops=drops,
        fresh=chunks,
    )
    memory = DeviceMemory(
        config,
        weights,
        shape,
        place(config, grid),
        kv=parts.tables.cache,
        state=parts.tables.state.arena,
        progress=lambda done, total: progress("tape", done, total),
    )
    session = Session(memory, park_ns=spec.idle_park_ms * 1_000_000)
    progress("compile", 0, 1)
    session.write(w.QUIT)
    session.leave()
    progress("compile", 1, 1)
    return session
