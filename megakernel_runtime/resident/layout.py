"""From a model's configuration to a kernel variant and its instruction words. Standard library only.

Must not know: tensors, devices.
"""

from __future__ import annotations

from megakernel_runtime.kernels.shape import TILE_BYTES, KernelShape, warp_tokens
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import Placement, Task, padded

INSTRUCTION_WORDS = 12
SHARED_BYTES = 232_448  # of a CTA on Hopper
HEAD_DIMS = (64, 128)
MAX_GROUP = 8


def why_not(config: ModelConfig) -> str | None:
    """Return why the kernel cannot run a model, None if it can."""
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim is {config.head_dim}; the kernel has {HEAD_DIMS}"
    if config.group_size > MAX_GROUP:
        return f"{config.group_size} query heads share a key head; the kernel has room for {MAX_GROUP}"
    for name, size in (("hidden_size", config.hidden_size), ("width of all query heads", config.q_size)):
        if size % 64:
            return f"{name} is {size}, no multiple of 64"
    return None


def ring_stages(rows: int, head_dim: int) -> int:
    """Return how many ring slots fit beside the other shared memory of a variant."""
    scratch = 2 * 8 * 16 * rows * 4 + 2 * 8 * rows * 4
    tokens = warp_tokens(head_dim)
    attention = 8 * tokens * head_dim * 2 + 2 * 8 * 8 * 4 + 4 * 16 * head_dim * 2
    spare = 8 * 1024  # barriers, the compiler's own
    return (SHARED_BYTES - scratch - attention - spare) // TILE_BYTES


def shape_of(
    config: ModelConfig,
    *,
    rows: int,
    grid: int,
    slots: int,
    n_pages: int,
    max_len: int,
    page: int = 32,
    by_sm: bool = False,
    drops: bool = False,
    fresh: bool = True,
) -> KernelShape:
    """Return the variant of the kernel for a model, a bucket of `rows` and a grid. `max_len` is rounded up to pages."""
    return KernelShape(
        hidden=config.hidden_size,
        q=config.q_size,
        kv=config.kv_size,
        head_dim=config.head_dim,
        group=config.group_size,
        ffn=padded(config.ffn_size),
        vocab=config.vocab_size,
        layers=config.n_layers,
        rows=rows,
        stages=ring_stages(rows, config.head_dim),
        grid=grid,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        window=config.sliding_window or 0,
        eps=config.norm_eps,
        max_len=-(-max_len // page) * page,
        n_pages=n_pages,
        page=page,
        slots=slots,
        by_sm=by_sm,
        drops=drops,
        fresh=fresh,
    )


def instruction(shape: KernelShape, task: Task) -> tuple[int, ...]:
    """Return the words of one CTA's part of one instruction, as kernels/step.py reads them."""
    layer, hidden = task.layer, shape.rows * shape.hidden
    qkv = shape.at_qkv + layer * shape.rows * shape.qkv
    attn = shape.at_attn + layer * shape.rows * shape.q
    mid = shape.at_mid + layer * hidden
    act = shape.at_act + layer * shape.rows * shape.ffn
    source, target, columns, width, normed = {
        Op.QKV: (layer * hidden, qkv, shape.hidden, shape.qkv, 1),
        Op.OUT: (attn, mid, shape.q, shape.hidden, 0),
        Op.GATE_UP: (mid, act, shape.hidden, shape.ffn, 1),
        Op.DOWN: (act, (layer + 1) * hidden, shape.ffn, shape.hidden, 0),
        Op.LM_HEAD: (layer * hidden, 0, shape.hidden, shape.vocab, 1),
    }.get(task.op, (0, 0, 0, 0, 0))
    words = (int(task.op), layer, task.first, task.count, source, target, columns, width, normed)
    return words + (0,) * (INSTRUCTION_WORDS - len(words))


def code_of(
    shape: KernelShape, placement: Placement, starts: tuple[int, ...], counts: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return (meta, code): per CTA its tape run and its instructions' run, and all instructions."""
    meta: list[tuple[int, ...]] = []
    code: list[tuple[int, ...]] = []
    for cta, tasks in enumerate(placement.tasks):
        meta.append((starts[cta], counts[cta], len(code), len(tasks)))
        code += [instruction(shape, task) for task in tasks]
    return meta, code
