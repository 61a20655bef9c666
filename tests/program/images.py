"""Shared by tests of programs: the artefacts of a kernel variant, as a server start makes them."""

from __future__ import annotations

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.placement import place
from megakernel_runtime.program.validate import Image
from megakernel_runtime.resident.layout import code_of, shape_of


def model(architecture, hidden, layers, heads, kv_heads, head_dim, ffn, vocab, **extras):
    """A configuration; `extras` are fields of ModelConfig."""
    config = ModelConfig(architecture, vocab, hidden, layers, heads, kv_heads, head_dim, ffn, 1e-5, 1e4, 8192)
    return config.__class__(**{name: getattr(config, name) for name in config.__slots__} | extras)


def image_of(config, grid, rows, *, shape=None, placement=None, sms=None, max_len=4096):
    """What a start on `sms` SMs (default: as many as CTAs) would run, without weights."""
    shape = shape or shape_of(config, rows=rows, grid=grid, slots=4 * rows, n_pages=256, max_len=max_len)
    placement = placement or place(config, grid)
    counts = tuple(placement.tiles(config, cta) for cta in range(grid))
    starts = tuple(sum(counts[:cta]) for cta in range(grid))
    meta, code = code_of(shape, placement, starts, counts)
    return Image(config, shape, placement, meta, code, starts, counts, sum(counts), sms or grid)
