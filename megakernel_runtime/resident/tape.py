"""The weight tape: all matrices repacked, so that each CTA reads one unbroken run of bytes in the order of its needs.

A tile is 16 rows x 512 columns as 8 sub-blocks (8, 16, 64); rows and columns are padded with zeros. Must not know:
device code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import ROW_TILE, TILE_COLUMNS, Placement, row_chunks

WARPS, SUB_COLUMNS = 8, 64


@dataclass(frozen=True, slots=True)
class Tape:
    """`tiles` (tiles * 8, 16, 64) bf16; `starts[c]`, `counts[c]`: CTA c's first tile and how many it streams a step."""

    tiles: torch.Tensor
    starts: tuple[int, ...]
    counts: tuple[int, ...]


def tile_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """(rows, columns) -> (row tiles, chunks, 8, 16, 64), zero-padded."""
    rows, columns = matrix.shape
    pad_rows, pad_columns = -rows % ROW_TILE, -columns % TILE_COLUMNS
    matrix = torch.nn.functional.pad(matrix, (0, pad_columns, 0, pad_rows))
    tiles = matrix.view(-1, ROW_TILE, matrix.shape[1] // TILE_COLUMNS, WARPS, SUB_COLUMNS)
    return tiles.permute(0, 2, 3, 1, 4)


def untile_matrix(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `tile_matrix`: padding dropped."""
    row_tiles, chunks = tiles.shape[:2]
    return tiles.permute(0, 3, 1, 2, 4).reshape(row_tiles * ROW_TILE, chunks * TILE_COLUMNS)[:rows, :columns]


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(ffn, columns) twice -> (2 * ffn, columns): 8 rows of gate, 8 of up, and so on, so that one tile holds both."""
    half = ROW_TILE // 2
    return torch.stack((gate.view(-1, half, gate.shape[1]), up.view(-1, half, up.shape[1])), 1).flatten(0, 2)


def matrix_of(config: ModelConfig, weights: Mapping[str, torch.Tensor], op: Op, layer: int) -> torch.Tensor:
    """Return the matrix that `op` of `layer` multiplies with, rows in the order of its outputs."""
    p = f"layers.{layer}."
    if op is Op.QKV:
        return torch.cat((weights[p + "q"], weights[p + "k"], weights[p + "v"]))
    if op is Op.GATE_UP:
        return interleave(weights[p + "gate"], weights[p + "up"])
    if op is Op.LM_HEAD:
        return weights["embed" if config.tied_embeddings else "lm_head"]
    return weights[p + ("o" if op is Op.OUT else "down")]


def pack_tape(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    placement: Placement,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> Tape:
    """Return the tape of `placement` on `device`; `progress` is told (instructions done, of how many)."""
    counts = tuple(placement.tiles(config, cta) for cta in range(placement.grid))
    starts = tuple(sum(counts[:cta]) for cta in range(placement.grid))
    tape = torch.empty((sum(counts), WARPS, ROW_TILE, SUB_COLUMNS), dtype=torch.bfloat16, device=device)
    cursors = list(starts)
    steps = placement.tasks[0]
    for i, step in enumerate(steps):
        chunks = row_chunks(config, step.op)
        if chunks:
            matrix = matrix_of(config, weights, step.op, step.layer).to(device=device, dtype=torch.bfloat16)
            tiles = tile_matrix(matrix).reshape(-1, WARPS, ROW_TILE, SUB_COLUMNS)
            for cta in range(placement.grid):
                task = placement.tasks[cta][i]
                n = task.count * chunks
                tape[cursors[cta] : cursors[cta] + n] = tiles[task.first * chunks : task.first * chunks + n]
                cursors[cta] += n
        if progress is not None:
            progress(i + 1, len(steps))
    return Tape(tape.view(-1, ROW_TILE, SUB_COLUMNS), starts, counts)
