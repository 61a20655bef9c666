"""The tape holds every weight once, where its CTA will look for it."""

import pytest
import torch

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.placement import place, row_chunks
from megakernel_runtime.resident.tape import interleave, matrix_of, pack_tape, tile_matrix, untile_matrix
from megakernel_runtime.weights.random_weights import random_weights

CONFIG = ModelConfig("llama", 203, 96, 2, 3, 1, 32, 112, 1e-5, 1e4, 512)


@pytest.mark.parametrize(("rows", "columns"), [(16, 512), (1, 1), (40, 576), (203, 96)])
def test_tiles_and_back(rows, columns):
    matrix = torch.randn(rows, columns)
    assert torch.equal(untile_matrix(tile_matrix(matrix), rows, columns), matrix)


def test_gate_and_up_share_tiles():
    gate, up = torch.arange(32.0)[:, None], 100 + torch.arange(32.0)[:, None]
    tile = interleave(gate, up)[:16, 0]
    assert tile.tolist() == [base + i for i in range(8) for base in (0, 100)]


@pytest.mark.parametrize("grid", [1, 3, 20])
def test_every_matrix_can_be_read_back(grid):
    weights = random_weights(CONFIG, 0)
    placement = place(CONFIG, grid)
    told = []
    tape = pack_tape(CONFIG, weights, placement, torch.device("cpu"), lambda done, of: told.append((done, of)))
    tiles = tape.tiles.view(-1, 8, 16, 64)
    assert tiles.shape[0] == sum(tape.counts)
    cursors = list(tape.starts)
    for i, step in enumerate(placement.tasks[0]):
        if not (chunks := row_chunks(CONFIG, step.op)):
            continue
        parts = []
        for cta in range(grid):
            n = placement.tasks[cta][i].count * chunks
            parts.append(tiles[cursors[cta] : cursors[cta] + n])
            cursors[cta] += n
        matrix = matrix_of(CONFIG, weights, step.op, step.layer)
        got = untile_matrix(torch.cat(parts).view(-1, chunks, 8, 16, 64), *matrix.shape)
        assert torch.equal(got, matrix.to(torch.bfloat16))
    assert told[-1] == (len(placement.tasks[0]), len(placement.tasks[0]))
