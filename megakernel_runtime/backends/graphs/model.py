"""The program bound to a model's weights on one device: each instruction becomes a call of an operation.

Matrices that read the same input are one (q, k, v; gate, up). What OUT and DOWN add to the residual is added by the
norm that follows. COMBINE is part of ATTEND, ADVANCE of SAMPLE. Must not know: plans, graphs, how operations are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megakernel_runtime.backends.graphs.ops import Ops, Tables
from megakernel_runtime.backends.graphs.shapes import Shape
from megakernel_runtime.interface import Progress
from megakernel_runtime.program.builder import build_program
from megakernel_runtime.program.isa import Instruction, Op

_UNSET = torch.empty(0)


@dataclass(slots=True)
class _State:
    """What instructions of one step hand on. Buffers carry the names of the program's where they are the same."""

    shape: Shape
    resid: Tensor = _UNSET  # (T, H) f32, without `delta`
    delta: Tensor | None = None  # (T, H), still to be added to `resid`
    qkv: Tensor = _UNSET  # (T, all heads * head_dim)
    attn: Tensor = _UNSET  # (T, heads * head_dim)
    act: Tensor = _UNSET  # (T, F)
    logits: Tensor = _UNSET  # (outs, V) f32


_Bound = Callable[[_State], None]


class GraphsModel:
    """Calling it runs one step of the rows in the tables' frame. It may be captured: addresses never change."""

    def __init__(self, tables: Tables, ops: Ops, weights: Mapping[str, Tensor], progress: Progress) -> None:
        """Move the weights to the device, fused, telling `progress` after each instruction."""
        self._tables = tables
        self._ops = ops
        self._device = tables.cache.device
        self._moved: dict[str, Tensor] = {}
        self._steps: list[_Bound] = []
        self._sizes: dict[int, int] = {}  # by address, of what a step reads in full
        instructions = build_program(tables.config).instructions
        for done, instruction in enumerate(instructions, 1):
            bound = self._bind(instruction, weights)
            if bound is not None:
                self._steps.append(bound)
            progress("pack", done, len(instructions))

    @property
    def weight_bytes(self) -> int:
        """What one step reads of the weights; of an embedding that is no head, next to nothing."""
        return sum(self._sizes.values())

    def __call__(self, shape: Shape) -> None:
        """Run the current frame as a step of `shape`."""
        state = _State(shape)
        for step in self._steps:
            step(state)

    def _bind(self, instruction: Instruction, weights: Mapping[str, Tensor]) -> _Bound | None:
        """Return what executes `instruction`; None where another one has done its work."""
        layer = instruction.layer or 0
        match instruction.op:
            case Op.EMBED:
                return self._bind_embed(self._whole(instruction.weights[0], weights))
            case Op.QKV:
                return self._bind_qkv(instruction, weights, layer)
            case Op.ATTEND:
                return lambda state: self._attend(state, layer)
            case Op.OUT:
                matrix = self._fused(instruction.weights, weights)
                return lambda state: _project(state, state.attn, matrix)
            case Op.GATE_UP:
                return self._bind_gate_up(instruction, weights)
            case Op.DOWN:
                matrix = self._fused(instruction.weights, weights)
                return lambda state: _project(state, state.act, matrix)
            case Op.LM_HEAD:
                return self._bind_lm_head(instruction, weights)
            case Op.SAMPLE:
                return self._sample
            case Op.COMBINE | Op.ADVANCE:
                return None

    def _bind_embed(self, table: Tensor) -> _Bound:
        def embed(state: _State) -> None:
            state.resid = self._ops.embed(state.shape, table)

        return embed

    def _bind_qkv(self, instruction: Instruction, weights: Mapping[str, Tensor], layer: int) -> _Bound:
        c, ops = self._tables.config, self._ops
        names = list(instruction.weights)
        norm, matrix = self._fused(names[:1], weights), self._fused(names[1:4], weights)
        bias = self._fused(names[4:7], weights) if c.qkv_bias else None
        q_norm, k_norm = (self._fused([name], weights) for name in names[-2:]) if c.qk_norm else (None, None)

        def qkv(state: _State) -> None:
            state.qkv = functional.linear(self._normed(state, norm), matrix, bias)
            ops.rope(state.qkv, layer, q_norm, k_norm)

        return qkv

    def _bind_gate_up(self, instruction: Instruction, weights: Mapping[str, Tensor]) -> _Bound:
        norm, matrix = self._fused(instruction.weights[:1], weights), self._fused(instruction.weights[1:], weights)

        def gate_up(state: _State) -> None:
            state.act = self._ops.silu_mul(functional.linear(self._normed(state, norm), matrix))

        return gate_up

    def _bind_lm_head(self, instruction: Instruction, weights: Mapping[str, Tensor]) -> _Bound:
        norm = self._fused(instruction.weights[:1], weights)
        head = self._whole(instruction.weights[1], weights)
        self._sizes[head.data_ptr()] = head.nbytes

        def lm_head(state: _State) -> None:
            if state.shape.outs and state.delta is not None:
                x = self._ops.norm_outs(state.shape, state.resid, state.delta, norm)
                state.logits = self._ops.logits(x, head)

        return lm_head

    def _attend(self, state: _State, layer: int) -> None:
        state.attn = self._ops.attend(state.shape, state.qkv, layer)

    def _sample(self, state: _State) -> None:
        if state.shape.outs:
            self._ops.sample(state.shape, state.logits)

    def _normed(self, state: _State, weight: Tensor) -> Tensor:
        """Return the residual stream, normed, with what was still to be added."""
        delta, state.delta = state.delta, None
        return self._ops.add_norm(state.resid, delta, weight)

    # ---------------------------------------------------------------- weights

    def _fused(self, names: tuple[str, ...] | list[str], weights: Mapping[str, Tensor]) -> Tensor:
        """Return weights stacked along their first dimension, on the device. A step reads all of it."""
        parts = [weights[name] for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        fused = torch.empty(shape, dtype=self._tables.dtype, device=self._device)
        row = 0
        for part in parts:
            fused[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        self._sizes[fused.data_ptr()] = fused.nbytes
        return fused

    def _whole(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        """Return one weight on the device, always the same tensor: an embedding may be the head too."""
        if name not in self._moved:
            self._moved[name] = weights[name].to(self._device, self._tables.dtype).contiguous()
        return self._moved[name]


def _project(state: _State, x: Tensor, matrix: Tensor) -> None:
    """OUT and DOWN."""
    state.delta = functional.linear(x, matrix)
