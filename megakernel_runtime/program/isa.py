"""The instruction set as data: what a decoder step is made of, and what each instruction reads, writes and needs.

The single source of truth for the builder, the checker, the reference interpreter, the placement and the device code
(whose opcode constants are `Op`'s values). Standard library only; must not know: devices, batches, tensors.

One step runs T rows (tokens of any slots, prefill and decode mixed). Activations are (T, columns).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Op(enum.IntEnum):
    """Opcodes. Values are shared with device code: append only."""

    EMBED = 0  # resid = embed[token]
    QKV = 1  # q, k, v = rope(qk_norm(rmsnorm(resid) @ W + bias)); k and v go to the KV pages
    ATTEND = 2  # partial softmax(q k^T) v over one span of the context
    COMBINE = 3  # attn = merge of the partials of all spans
    OUT = 4  # resid += attn @ W
    GATE_UP = 5  # act = silu(rmsnorm(resid) @ Wg) * (rmsnorm(resid) @ Wu)
    DOWN = 6  # resid += act @ W
    LM_HEAD = 7  # logits = rmsnorm(resid) @ W, for rows that sample
    SAMPLE = 8  # token = sampler(logits, slot parameters)
    ADVANCE = 9  # slot state: append the token, position + 1, finish checks


class Kind(enum.StrEnum):
    """Where a buffer lives and how long."""

    ACTIVATION = "activation"  # rewritten every layer or step
    KV = "kv"  # paged, lives as long as its sequence
    STATE = "state"  # per slot: tokens, position, sampling parameters


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value that instructions exchange. `columns` is the width of one row, `dtype` its element type on the device."""

    name: str
    kind: Kind
    columns: int
    dtype: str  # "f32" | "bf16" | "i32"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on all rows of a step. `weights` are names of `ModelConfig.weight_shapes`, in a fixed order per op:

    EMBED embed; QKV norm_attn, q, k, v [, q_bias, k_bias, v_bias] [, q_norm, k_norm]; OUT o;
    GATE_UP norm_mlp, gate, up; DOWN down; LM_HEAD norm_final, lm_head (or embed when tied).
    """

    op: Op
    layer: int | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A whole step of one model: instructions in program order over named buffers."""

    buffers: tuple[Buffer, ...]
    instructions: tuple[Instruction, ...]

    def buffer(self, name: str) -> Buffer:
        """Return the buffer called `name`; KeyError if there is none."""
        for b in self.buffers:
            if b.name == name:
                return b
        raise KeyError(name)
