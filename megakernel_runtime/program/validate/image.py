"""What is checked: the artefacts of one kernel variant, and a CTA's part of an instruction as the kernel reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import Placement
from megakernel_runtime.program.validate.shape import Shape

WORDS = 12  # of an instruction: op, layer, first tile, tiles, source, target, columns, width, normed; the rest zero
USED_WORDS = 9
MATRIX_OPS = (Op.QKV, Op.OUT, Op.GATE_UP, Op.DOWN, Op.LM_HEAD)


class ProgramError(Exception):
    """A program that must not run. The message names the instruction, the CTA and the range that are wrong."""


@dataclass(frozen=True, slots=True)
class Image:
    """All that a launch depends on.

    meta: per CTA first tape tile, tape tiles, first instruction, instructions. code: WORDS words an instruction.
    starts, counts: each CTA's run of the tape, which has `tape_tiles` tiles. sms: SMs of the GPU.
    """

    config: ModelConfig
    shape: Shape
    placement: Placement
    meta: Sequence[tuple[int, ...]]
    code: Sequence[tuple[int, ...]]
    starts: Sequence[int]
    counts: Sequence[int]
    tape_tiles: int
    sms: int


@dataclass(frozen=True, slots=True)
class Part:
    """One CTA's part of one instruction, `index` in its list. Offsets and widths are elements of a step's buffer."""

    cta: int
    index: int
    op: Op
    layer: int
    first: int
    count: int
    source: int
    target: int
    columns: int
    width: int
    normed: int

    def __str__(self) -> str:
        """Return how errors name it."""
        return f"{self.op.name} of layer {self.layer} (CTA {self.cta}, instruction {self.index})"


@dataclass(frozen=True, slots=True)
class Region:
    """A (rows, width) run of a step's activations, written by all CTAs' parts of one instruction."""

    start: int
    width: int
    op: Op
    layer: int

    def __str__(self) -> str:
        """Return how errors name it."""
        return f"the output of {self.op.name} of layer {self.layer} at element {self.start}"
