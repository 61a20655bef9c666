"""The weight tape: all matrices repacked, so that each CTA reads one unbroken run of bytes in the order of its needs.

A tile is 16 rows x 512 columns as 8 sub-blocks (8, 16, 64); rows and columns are padded with zeros. Within a sub-block
the columns are permuted: an MMA wants columns (2i, 2i + 1, 2i + 8, 2i + 9) of 16 in thread i, and so that the thread
can load the activations of four MMAs as two runs of 8 neighbours, 8i .. 8i + 7 and 32 further, the weights' columns
change places instead. A row of a sub-block is 128 bytes in 8 pieces; piece p of row r stands at p xor r mod 8, as a
tile lies in shared memory, so that a tile is copied as it is and read without bank conflicts. Must not know: device
code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import ROW_TILE, TILE_COLUMNS, Placement, padded, row_chunks

WARPS, SUB_COLUMNS = 8, 64
# Column of the matrix that stands at each place of a sub-block: an MMA takes four neighbours of each thread's runs
COLUMN_AT = tuple(
    32 * (mma // 2) + 8 * thread + 4 * (mma % 2) + 2 * half + low
    for mma in range(4)
    for half in range(2)
    for thread in range(4)
    for low in range(2)
)


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
    return _swizzle(tiles[..., COLUMN_AT].permute(0, 2, 3, 1, 4))


def _swizzle(tiles: torch.Tensor) -> torch.Tensor:
    """(..., 16, 64) -> the same with the pieces of 8 columns of each row in their places; its own inverse."""
    row, column = torch.arange(16)[:, None], torch.arange(64)[None, :]
    return torch.gather(tiles, -1, (column ^ row % 8 * 8).to(tiles.device).expand(tiles.shape))


def untile_matrix(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `tile_matrix`: padding dropped."""
    row_tiles, chunks = tiles.shape[:2]
    place_of = sorted(range(SUB_COLUMNS), key=COLUMN_AT.__getitem__)
    return (
        _swizzle(tiles)[..., place_of]
        .permute(0, 3, 1, 2, 4)
        .reshape(row_tiles * ROW_TILE, chunks * TILE_COLUMNS)[:rows, :columns]
    )


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(ffn, columns) twice -> (2 * padded ffn, columns): rows of gate and up in turn, so that one tile holds both."""
    missing = padded(gate.shape[0]) - gate.shape[0]
    gate, up = (torch.nn.functional.pad(half, (0, 0, 0, missing)) for half in (gate, up))
    return torch.stack((gate, up), 1).flatten(0, 1)


def matrix_of(config: ModelConfig, weights: Mapping[str, torch.Tensor], op: Op, layer: int) -> torch.Tensor:
    """Return the matrix that `op` of `layer` multiplies with, rows in the order of its outputs.

    Where the input is normed, the norm's weights are in the columns: the kernel only divides by the root mean square.
    """
    p = f"layers.{layer}."
    if op is Op.QKV:
        return _scaled(torch.cat((weights[p + "q"], weights[p + "k"], weights[p + "v"])), weights[p + "norm_attn"])
    if op is Op.GATE_UP:
        return _scaled(interleave(weights[p + "gate"], weights[p + "up"]), weights[p + "norm_mlp"])
    if op is Op.LM_HEAD:
        return _scaled(weights["embed" if config.tied_embeddings else "lm_head"], weights["norm_final"])
    return weights[p + ("o" if op is Op.OUT else "down")]


def _scaled(matrix: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return a matrix with its columns scaled, in fp32."""
    return matrix.float() * columns.to(matrix.device).float()


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
