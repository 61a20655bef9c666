"""The operations of which a step is made, and the tensors that they share: the seam between the program and devices.

`device.ops.TritonOps` runs them as Triton kernels, `torch_ops.TorchOps` in plain torch on any device: it is what the
kernels are compared with. Matrix products are torch's own in both. Must not know: programs, plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megakernel_runtime.backends.graphs.frame import FrameLayout
from megakernel_runtime.backends.graphs.shapes import Shape, max_blocks
from megakernel_runtime.device_state.state import SlotState
from megakernel_runtime.interface import MAX_TOP_LOGPROBS, Capacity
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.reference.rope import inverse_frequencies

RESULT_WORDS = 4  # token, outcome, logprob (f32), unused


@dataclass(frozen=True, slots=True)
class Tables:
    """Everything that steps read and write besides weights and activations. Addresses never change."""

    config: ModelConfig
    dtype: torch.dtype
    page_size: int
    max_len: int
    state: SlotState
    frame: FrameLayout
    cache: Tensor  # (layers, pages, keys then values, KV heads, page size, head_dim)
    cosines: Tensor  # (max_len, head_dim / 2) f32
    sines: Tensor
    positions: Tensor  # (max_rows,) i32, of the step's rows, -1: skipped
    places: Tensor  # (max_rows,) i32: page * page size + offset, -1: none
    result: Tensor  # (max_slots, RESULT_WORDS) i32
    log_sums: Tensor  # (max_slots,) f32
    top_ids: Tensor  # (max_slots, MAX_TOP_LOGPROBS) i32
    top_logprobs: Tensor  # f32


def make_tables(config: ModelConfig, capacity: Capacity, device: torch.device, dtype: torch.dtype) -> Tables:
    """Allocate all of it on `device`, activations and cache in `dtype`."""
    c, n_slots, n_rows = config, capacity.max_slots, capacity.max_step_tokens
    page, max_len = capacity.page_size_tokens, capacity.max_model_len_tokens
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), inverse_frequencies(config))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Tables(
        config=config,
        dtype=dtype,
        page_size=page,
        max_len=max_len,
        state=SlotState(n_slots, page, c.vocab_size, max_len, device),
        frame=FrameLayout(n_rows, max_blocks(n_slots, n_rows), n_slots, device),
        cache=empty(c.n_layers, capacity.n_pages, 2, c.n_kv_heads, page, c.head_dim, dtype=dtype),
        cosines=angles.cos().float().to(device),
        sines=angles.sin().float().to(device),
        positions=empty(n_rows),
        places=empty(n_rows),
        result=empty(n_slots, RESULT_WORDS),
        log_sums=empty(n_slots, dtype=torch.float32),
        top_ids=empty(n_slots, MAX_TOP_LOGPROBS),
        top_logprobs=empty(n_slots, MAX_TOP_LOGPROBS, dtype=torch.float32),
    )


class Ops(Protocol):
    """Operations over the tables' current frame. T is `shape.rows`; activations are of the tables' dtype."""

    def write_words(self, packet: Tensor) -> None:
        """Write the pairs of an update of `SlotState`, (2, n) i32 on the device, into its arena."""
        ...

    def embed(self, shape: Shape, table: Tensor) -> Tensor:
        """Find out what each row is, into `positions` and `places`; return the residual stream, (T, H) f32."""
        ...

    def add_norm(self, resid: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to the residual in place; return it normed, (T, H)."""
        ...

    def norm_outs(self, shape: Shape, resid: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """Return residual + `delta`, normed, of the rows that sample, (outs, H)."""
        ...

    def rope(self, qkv: Tensor, layer: int, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        """Norm (where given) and turn the queries of `qkv` (T, all heads * head_dim) in place; put keys, norm and turn
        included, and values into the cache.
        """
        ...

    def attend(self, shape: Shape, qkv: Tensor, layer: int) -> Tensor:
        """Return the attention of each row over its context, (T, heads * head_dim)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up of (T, 2 F), (T, F)."""
        ...

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x @ weight^T in f32, (outs, V)."""
        ...

    def sample(self, shape: Shape, logits: Tensor) -> None:
        """Choose a token for each output and advance its slot: `result`, with `full` the logprobs too. Overwrites
        `logits`.
        """
        ...
