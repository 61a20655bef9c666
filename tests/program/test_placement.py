"""Every row of every matrix has exactly one CTA, the residual has one owner, and no CTA has much more than its share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import ROW_TILE, place, row_chunks, rows_of

GRIDS = (1, 7, 78, 108, 114, 131, 132, 148, 160, 188)


def llama(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256):
    return ModelConfig("llama", vocab, hidden, layers, heads, kv_heads, head_dim, ffn, 1e-5, 1e4, 4096)


SHAPES = {
    "llama-1b": llama(),
    "smollm2": llama(576, 30, 9, 3, 64, 1536, 49152),
    "qwen3-8b": llama(4096, 36, 32, 8, 128, 12288, 151936),
}


def assert_complete(config, placement):
    for i, step in enumerate(placement.tasks[0]):
        tasks = [own[i] for own in placement.tasks]
        assert {(task.op, task.layer) for task in tasks} == {(step.op, step.layer)}
        if row_chunks(config, step.op):
            covered = [tile for task in tasks for tile in range(task.first, task.first + task.count)]
            assert covered == list(range(-(-rows_of(config, step.op) // ROW_TILE)))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_tile_has_one_cta(shape, grid):
    assert_complete(SHAPES[shape], place(SHAPES[shape], grid))


@pytest.mark.parametrize("grid", GRIDS)
def test_residual_columns_keep_their_owner(grid):
    placement = place(SHAPES["llama-1b"], grid)
    for own in placement.tasks:
        assert len({(t.first, t.count) for t in own if t.op in {Op.EMBED, Op.OUT, Op.DOWN}}) == 1


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shape", ["llama-1b", "qwen3-8b"])
def test_no_cta_has_much_more_than_its_share(shape, grid):
    config = SHAPES[shape]
    placement = place(config, grid)
    tiles = [placement.tiles(config, cta) for cta in range(grid)]
    owner_tile = config.n_layers * (row_chunks(config, Op.OUT) + row_chunks(config, Op.DOWN))
    assert max(tiles) <= sum(tiles) / grid + owner_tile  # a tile of the residual comes with its owner, in all layers


def test_faster_ctas_get_more():
    config = SHAPES["llama-1b"]
    rates = [1.0] * 66 + [1.25] * 66
    placement = place(config, 132, rates)
    assert_complete(config, placement)
    tiles = [placement.tiles(config, cta) for cta in range(132)]
    assert sum(tiles[66:]) > 1.15 * sum(tiles[:66])


@given(
    grid=st.integers(1, 200),
    heads=st.integers(1, 12),
    ffn=st.integers(1, 60),
    vocab=st.integers(1, 3000),
    rates=st.lists(st.floats(0.2, 5.0), min_size=200, max_size=200),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_on_any_grid(grid, heads, ffn, vocab, rates):
    config = llama(heads * 64, 3, heads, 1, 64, ffn * 16, vocab)
    assert_complete(config, place(config, grid, rates[:grid]))
