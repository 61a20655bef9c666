"""Instruction lists and tape runs: every CTA has its own, whole, apart from the others', and the two agree."""

from __future__ import annotations

from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import TILE_COLUMNS, Task
from megakernel_runtime.program.validate.image import MATRIX_OPS, USED_WORDS, WORDS, Image, Part, ProgramError

MAX_GRID = 256  # a sampler looks at the best token of so many CTAs at once


def check_structure(image: Image) -> list[list[Part]]:
    """Return every CTA's instructions as the kernel will read them."""
    _check_grid(image)
    _check_lists(image)
    parts = [_decode(image, cta) for cta in range(image.shape.grid)]
    steps = _expected_steps(image)
    for cta, own in enumerate(parts):
        _check_order(own, parts[0], steps)
        _check_tasks(own, image.placement.tasks[cta])
    _check_tape(image, parts)
    return parts


def _check_grid(image: Image) -> None:
    grid, sms = image.shape.grid, image.sms
    if not 1 <= grid <= sms:
        raise ProgramError(f"grid is {grid}, but all CTAs must be resident at once, one on each of {sms} SMs")
    if grid > MAX_GRID:
        raise ProgramError(f"grid is {grid}; samplers look at {MAX_GRID} CTAs at most")
    if image.shape.by_sm and grid != sms:
        raise ProgramError(f"CTAs are numbered by SM, so grid must be all {sms} SMs, not {grid}")
    for name, n in (
        ("placement", image.placement.grid),
        ("placement's tasks", len(image.placement.tasks)),
        ("meta", len(image.meta)),
        ("tape starts", len(image.starts)),
        ("tape counts", len(image.counts)),
    ):
        if n != grid:
            raise ProgramError(f"{name}: for {n} CTAs, the kernel's grid is {grid}")


def _check_lists(image: Image) -> None:
    """Lists of instructions lie one after the other in `code`, without gaps."""
    end = 0
    for cta, words in enumerate(image.meta):
        if len(words) != 4:
            raise ProgramError(f"meta of CTA {cta}: {len(words)} words instead of 4")
        first, n = words[2], words[3]
        if first != end or n < 1:
            raise ProgramError(f"CTA {cta}: its {n} instructions start at {first}, the list before ends at {end}")
        end = first + n
    if end != len(image.code):
        raise ProgramError(f"lists of instructions end at {end}, code has {len(image.code)} instructions")


def _decode(image: Image, cta: int) -> list[Part]:
    first, n = image.meta[cta][2:]
    parts: list[Part] = []
    for index, words in enumerate(image.code[first : first + n]):
        where = f"CTA {cta}, instruction {index}"
        if len(words) != WORDS or any(words[USED_WORDS:]):
            raise ProgramError(f"{where}: {words} are not {USED_WORDS} words and {WORDS - USED_WORDS} zeros")
        try:
            op = Op(words[0])
        except ValueError:
            raise ProgramError(f"{where}: {words[0]} is no opcode") from None
        part = Part(cta, index, op, *words[1:USED_WORDS])
        if part.first < 0 or part.count < 0:
            raise ProgramError(f"{part}: {part.count} row tiles from {part.first}")
        parts.append(part)
    return parts


def _expected_steps(image: Image) -> dict[tuple[Op, int], int]:
    """The kernel folds COMBINE into ATTEND and ADVANCE into SAMPLE; layers of the others are fixed by the kernel."""
    layers = range(image.config.n_layers)
    body = [(op, n) for n in layers for op in (Op.QKV, Op.ATTEND, Op.OUT, Op.GATE_UP, Op.DOWN)]
    return dict.fromkeys([(Op.EMBED, 0), *body, (Op.LM_HEAD, image.config.n_layers), (Op.SAMPLE, 0)], 1)


def _check_order(own: list[Part], leader: list[Part], steps: dict[tuple[Op, int], int]) -> None:
    """Every CTA takes part in every instruction once, in the same order, SAMPLE last.

    The tape is packed in that order, counters expect one signal of each CTA when it has done all else, and rows and
    attention units are dealt out to all CTAs. Which orders end is judged by `waits`.
    """
    left = dict(steps)
    for part in own:
        if left.pop((part.op, part.layer), None) is None:
            raise ProgramError(f"{part}: a step has no such instruction, or this CTA has it twice")
    if left:
        op, layer = next(iter(left))
        raise ProgramError(f"CTA {own[0].cta}: {op.name} of layer {layer} is missing")
    for part, other in zip(own, leader, strict=True):
        if (part.op, part.layer) != (other.op, other.layer):
            raise ProgramError(f"{part}: CTA {other.cta} has {other.op.name} of layer {other.layer} here")
    if own[-1].op is not Op.SAMPLE:
        raise ProgramError(f"{own[-1]} comes after SAMPLE, whose signals say that the CTA's step is done")


def _check_tasks(own: list[Part], tasks: tuple[Task, ...]) -> None:
    """The tape was packed by the placement: code that takes other tiles would multiply with other weights."""
    for part, task in zip(own, tasks, strict=False):
        if (part.op, part.layer, part.first, part.count) != (task.op, task.layer, task.first, task.count):
            raise ProgramError(f"{part}: row tiles {_run(part)}, but the tape was packed for {task}")
    if len(own) != len(tasks):
        raise ProgramError(f"CTA {own[0].cta}: {len(own)} instructions, the placement has {len(tasks)}")


def _run(part: Part) -> str:
    return f"{part.first} .. {part.first + part.count - 1}"


def _check_tape(image: Image, parts: list[list[Part]]) -> None:
    """Runs lie one after the other, fill the tape, and are as long as what a step takes from the ring."""
    end = 0
    for cta, own in enumerate(parts):
        start, n = image.starts[cta], image.counts[cta]
        if image.meta[cta][:2] != (start, n):
            raise ProgramError(f"CTA {cta}: meta says tape tiles {image.meta[cta][:2]}, the tape has {(start, n)}")
        if start != end:
            raise ProgramError(f"CTA {cta}: its tape run starts at tile {start}, the run before ends at {end}")
        taken = sum(part.count * -(-part.columns // TILE_COLUMNS) for part in own if part.op in MATRIX_OPS)
        if taken != n:
            raise ProgramError(f"CTA {cta}: its instructions take {taken} tiles a step, its tape run has {n}")
        if not n and start + image.shape.stages > image.tape_tiles:
            raise ProgramError(
                f"CTA {cta} has no tiles: its producer would fill the ring from tile {start} on, beyond the tape's "
                f"{image.tape_tiles}; use fewer CTAs (sm_reserve)"
            )
        end = start + n
    if end != image.tape_tiles:
        raise ProgramError(f"tape runs end at tile {end}, the tape has {image.tape_tiles}")
