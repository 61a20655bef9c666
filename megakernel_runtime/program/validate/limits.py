"""The numbers of a variant: what the kernel was written for, shared memory, arenas, and attention's units.

The kernel's own sizes are stated here again on purpose: a change there must be judged here.
"""

from __future__ import annotations

from megakernel_runtime.program.placement import padded
from megakernel_runtime.program.validate.image import Image, ProgramError
from megakernel_runtime.program.validate.shape import Shape

SHARED_BYTES = 232_448  # of a CTA on sm_90, the least of the GPUs that the kernel is for
COMPILER_BYTES = 2048  # of shared memory: what Triton keeps for itself
TILE_BYTES = 16 * 512 * 2
ROWS = (8, 16)  # buckets
CONTEXT_TOKENS = {64: 256, 128: 128}  # by head_dim: tokens of a context tile
MAX_GROUP = 8
MIN_STAGES = 2  # a warp gives a slot back when it has begun the product after
MAX_LAYERS = 1 << 16  # layers share a word with the opcode in the record of a wait that gave up
INT32 = 1 << 31


def check_limits(image: Image) -> None:
    """The kernel can run such a shape at all, and the shape is the model's."""
    shape = image.shape
    _check_model(image)
    _check_sizes(shape)
    _check_shared_memory(shape)
    _check_arenas(shape)
    _check_attention(shape)


def _check_model(image: Image) -> None:
    config, shape = image.config, image.shape
    for name, ours, due in (
        ("hidden", shape.hidden, config.hidden_size),
        ("q", shape.q, config.q_size),
        ("kv", shape.kv, config.kv_size),
        ("qkv", shape.qkv, config.q_size + 2 * config.kv_size),
        ("head_dim", shape.head_dim, config.head_dim),
        ("group", shape.group, config.group_size),
        ("ffn", shape.ffn, padded(config.ffn_size)),
        ("vocab", shape.vocab, config.vocab_size),
        ("layers", shape.layers, config.n_layers),
        ("window", shape.window, config.sliding_window or 0),
        ("qk_norm", shape.qk_norm, config.qk_norm),
        ("qkv_bias", shape.qkv_bias, config.qkv_bias),
    ):
        if ours != due:
            raise ProgramError(f"{name} is {ours}, the model's is {due}")


def _check_sizes(shape: Shape) -> None:
    for name, value, allowed in (("rows", shape.rows, ROWS), ("head_dim", shape.head_dim, tuple(CONTEXT_TOKENS))):
        if value not in allowed:
            raise ProgramError(f"{name} is {value}, the kernel is written for {allowed}")
    if not 1 <= shape.group <= MAX_GROUP:
        raise ProgramError(f"{shape.group} query heads share a key head, the kernel has room for {MAX_GROUP}")
    if not 1 <= shape.layers < MAX_LAYERS:
        raise ProgramError(f"layers: {shape.layers}, at most {MAX_LAYERS - 1}")


def _check_shared_memory(shape: Shape) -> None:
    """Ring with its barriers, partial sums, norms, attention's values, maxima and sums, two staged rows twice."""
    if shape.stages < MIN_STAGES:
        raise ProgramError(f"the ring has {shape.stages} slots and would stand still with fewer than {MIN_STAGES}")
    ring = shape.stages * (TILE_BYTES + 2 * 8)
    matrix = 2 * 8 * (16 + 1) * shape.rows * 4
    values = CONTEXT_TOKENS[shape.head_dim] * shape.head_dim * 2
    attention = values + 2 * 8 * 8 * 4 + 4 * 16 * shape.head_dim * 2
    need = ring + matrix + attention + COMPILER_BYTES
    if need > SHARED_BYTES:
        raise ProgramError(
            f"shared memory: {shape.stages} ring slots and {shape.rows} rows need {need} bytes; "
            f"a CTA has {SHARED_BYTES}"
        )


def _check_arenas(shape: Shape) -> None:
    """Page tables lie inside the state arena, apart from its other parts; offsets fit the kernel's 32-bit integers."""
    if shape.page < 1 or shape.page & (shape.page - 1) or shape.max_len % shape.page:
        raise ProgramError(
            f"pages of {shape.page} tokens: a power of two that divides max_len {shape.max_len} is needed"
        )
    if shape.max_pages * shape.page < shape.max_len:
        raise ProgramError(f"page tables of {shape.max_pages} pages hold fewer positions than max_len {shape.max_len}")
    if shape.slots < 1 or shape.n_pages < 1 or shape.max_len < 1:
        raise ProgramError(f"{shape.slots} slots, {shape.n_pages} pages, max_len {shape.max_len}: none may be 0")
    if not 0 <= shape.fields_at < shape.pages_at:
        raise ProgramError(f"slot fields at word {shape.fields_at} and page tables at {shape.pages_at} overlap")
    end = shape.pages_at + shape.slots * shape.max_pages
    if end > min(shape.stops_at, shape.state_words):
        raise ProgramError(
            f"page tables end at word {end} of the state arena, stop masks begin at {shape.stops_at}, "
            f"the arena ends at {shape.state_words}"
        )
    for name, n in (
        ("activations of two steps", 2 * shape.step_elements),
        ("words of the state arena", shape.state_words),
        ("words of partial results", shape.partial_words),
        ("logits", shape.rows * shape.vocab),
    ):
        if n >= INT32:
            raise ProgramError(f"{name}: {n} do not fit the kernel's 32-bit offsets")


def _check_attention(shape: Shape) -> None:
    """Heads make the widths, and partial results have room for any rows and contexts.

    Units are dealt out one CTA after the other from 0 to rows * key heads * spans, so each has one CTA; a unit writes
    partial results at its own number.
    """
    heads = shape.kv // shape.head_dim
    if heads * shape.head_dim != shape.kv or heads * shape.group * shape.head_dim != shape.q:
        raise ProgramError(f"{shape.group} x {heads} query heads of {shape.head_dim} do not make a width of {shape.q}")
    if shape.span < 1:
        raise ProgramError(f"attention spans of {shape.span} positions")
    spans = max(_spans(shape, position) for position in range(shape.max_len))
    units = shape.rows * heads * max(spans, 1)
    if units > shape.max_units:
        raise ProgramError(
            f"{units} attention units for {shape.rows} rows at {shape.max_len}, room for {shape.max_units}"
        )
    words = units * 8 * (shape.head_dim + 2)
    if words > shape.partial_words:
        raise ProgramError(f"partial results of {units} units take {words} words, the buffer has {shape.partial_words}")


def _spans(shape: Shape, position: int) -> int:
    """How many spans a row at `position` looks at, itself left out."""
    low = max(position - shape.window + 1, 0) if shape.window else 0
    return (position - 1) // shape.span - low // shape.span + 1 if position > low else 0
