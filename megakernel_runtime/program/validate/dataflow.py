"""Activations: each word has one writer a step, and each instruction reads what the program says, whole.

Ranges are compared as intervals of row tiles and of (rows, width) regions, never word by word.
"""

from __future__ import annotations

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.builder import build_program
from megakernel_runtime.program.isa import Instruction, Op
from megakernel_runtime.program.placement import ROW_TILE
from megakernel_runtime.program.validate.image import MATRIX_OPS, Image, Part, ProgramError, Region
from megakernel_runtime.program.validate.shape import Shape

ALIGNMENT = 8  # elements: activations are read in 16-byte loads
WIDTH_ALIGNMENT = 64  # columns: so many a warp and ring tile
NORMED_OPS = (Op.QKV, Op.GATE_UP, Op.LM_HEAD)
OWNER_OPS = (Op.EMBED, Op.OUT, Op.DOWN)

Step = tuple[Op, int]  # opcode and the layer that its instruction words name


def check_dataflow(image: Image, parts: list[list[Part]]) -> dict[Step, Region]:
    """Return the region that each instruction writes. Instructions must be in the same order in all lists."""
    regions: dict[Step, Region] = {}
    for i, part in enumerate(parts[0]):
        of_all = [own[i] for own in parts]
        _check_same_words(of_all)
        if part.normed != (part.op in NORMED_OPS):
            raise ProgramError(f"{part}: its input is normed: {part.normed}, should be: {int(part.op in NORMED_OPS)}")
        if part.op in MATRIX_OPS or part.op is Op.EMBED:
            _check_cover(image, of_all)
        if part.op not in {Op.LM_HEAD, Op.SAMPLE}:
            regions[part.op, part.layer] = _region(image.shape, part)
    _check_regions(image.shape, list(regions.values()))
    sources = _sources(image.config)
    for part in parts[0]:
        if part.op in MATRIX_OPS:
            _check_source(part, image.shape, regions, sources[part.op, part.layer])
    for own in parts:
        _check_owner(own)
    return regions


def _sources(config: ModelConfig) -> dict[Step, Step]:
    """Return, from the program, which instruction's output each matrix instruction multiplies with.

    What is no residual stream comes first: OUT and DOWN read both, but multiply with the other.
    """
    written: dict[str, Step] = {}
    sources: dict[Step, Step] = {}
    for instruction in build_program(config).instructions:
        step = _step_of(config, instruction)
        if instruction.op in MATRIX_OPS:
            operands = [name for name in instruction.reads if name in {"attn", "act"}]
            sources[step] = written[operands[0] if operands else "resid"]
        for name in instruction.writes:  # the kernel's ATTEND writes what the program's COMBINE does
            written[name] = (Op.ATTEND, step[1]) if instruction.op is Op.COMBINE else step
    return sources


def _step_of(config: ModelConfig, instruction: Instruction) -> Step:
    if instruction.op is Op.LM_HEAD:
        return instruction.op, config.n_layers
    return instruction.op, instruction.layer or 0


def _check_same_words(of_all: list[Part]) -> None:
    """All CTAs must mean the same buffers."""
    first = of_all[0]
    words = (first.source, first.target, first.columns, first.width, first.normed)
    for part in of_all:
        if (part.source, part.target, part.columns, part.width, part.normed) != words:
            raise ProgramError(f"{part}: other buffers than CTA {first.cta}'s: source, target, columns, width, normed")


def _matrix(config: ModelConfig, shape: Shape, op: Op) -> tuple[int, int, int]:
    """Return (rows, columns, output columns a row tile) of the matrix of `op`, from the shapes of its weights."""
    weights = config.weight_shapes()
    hidden = weights["embed"][1]
    if op is Op.EMBED:
        return hidden, 0, ROW_TILE
    if op is Op.QKV:
        return sum(weights[f"layers.0.{leaf}"][0] for leaf in "qkv"), hidden, ROW_TILE
    if op is Op.OUT:
        return hidden, weights["layers.0.o"][1], ROW_TILE
    if op is Op.GATE_UP:  # rows of gate and up in turn, padded
        return 2 * shape.ffn, hidden, ROW_TILE // 2
    if op is Op.DOWN:
        return hidden, shape.ffn, ROW_TILE
    return config.vocab_size, hidden, ROW_TILE


def _check_cover(image: Image, of_all: list[Part]) -> None:
    """Each row tile is computed by exactly one CTA, and the width is what all tiles make."""
    part = of_all[0]
    rows, columns, outputs = _matrix(image.config, image.shape, part.op)
    if part.op is not Op.EMBED and (part.columns != columns or columns % WIDTH_ALIGNMENT):
        raise ProgramError(f"{part}: {part.columns} columns; the matrix has {columns}, a multiple of {WIDTH_ALIGNMENT}")
    end = 0
    for run in sorted((part for part in of_all if part.count), key=lambda part: part.first):
        if run.first != end:
            what = "computed by nobody" if run.first > end else "computed twice"
            raise ProgramError(
                f"{run}: row tiles {min(run.first, end)} .. {max(run.first, end) - 1} before or in its run are {what}"
            )
        end = run.first + run.count
    n_tiles = -(-rows // ROW_TILE)
    if end != n_tiles:
        raise ProgramError(f"{part}: row tiles end at {end}, the matrix has {n_tiles}")
    width = rows * outputs // ROW_TILE
    if part.op in {Op.QKV, Op.OUT, Op.GATE_UP, Op.DOWN} and (part.width != width or rows % ROW_TILE):
        raise ProgramError(f"{part}: width {part.width}; {n_tiles} row tiles make {n_tiles * outputs} columns")


def _check_source(part: Part, shape: Shape, regions: dict[Step, Region], source: Step) -> None:
    """A matrix reads one region, whole, written by the instruction that the program names."""
    reads = f"{part} reads elements {part.source} .. {part.source + shape.rows * part.columns - 1}"
    found = [region for region in regions.values() if region.start == part.source]
    if not found:
        raise ProgramError(f"{reads}: no instruction writes a buffer there")
    region = found[0]
    if region.width != part.columns:
        raise ProgramError(f"{reads} in rows of {part.columns}, but rows of {region} have {region.width}")
    if (region.op, region.layer) != source:
        raise ProgramError(f"{reads}, {region}, but needs the output of {source[0].name} of layer {source[1]}")


def _region(shape: Shape, part: Part) -> Region:
    """Where an instruction writes. EMBED and ATTEND write where the kernel was compiled to, whatever the words say."""
    if part.op is Op.EMBED:
        return Region(0, shape.hidden, part.op, part.layer)
    if part.op is Op.ATTEND:
        return Region(shape.at_attn + part.layer * shape.rows * shape.q, shape.q, part.op, part.layer)
    region = Region(part.target, part.width, part.op, part.layer)
    if part.op is Op.QKV:
        due = shape.at_qkv + part.layer * shape.rows * shape.qkv
        if (region.start, region.width) != (due, shape.qkv):
            raise ProgramError(
                f"{part} writes rows of {region.width} at element {region.start}; "
                f"ATTEND reads rows of {shape.qkv} at {due}"
            )
    return region


def _check_regions(shape: Shape, regions: list[Region]) -> None:
    """Regions lie inside the buffer of one step, apart from each other, so that each word has one writer a step."""
    before: Region | None = None
    end = 0
    for region in sorted(regions, key=lambda region: region.start):
        if region.start < 0 or region.start % ALIGNMENT or region.width % ALIGNMENT:
            raise ProgramError(f"{region}: start and width {region.width} must be multiples of {ALIGNMENT}")
        if region.start < end:
            raise ProgramError(f"{region} overlaps {before}, which ends at {end}")
        before, end = region, region.start + shape.rows * region.width
        if end > shape.step_elements:
            raise ProgramError(f"{region} ends at {end}, a step's activations at {shape.step_elements}")


def _check_owner(own: list[Part]) -> None:
    """A column of the residual stream belongs to one CTA: nothing orders another's reads after its writes."""
    embed = next(part for part in own if part.op is Op.EMBED)
    for part in own:
        if part.op in OWNER_OPS and (part.first, part.count) != (embed.first, embed.count):
            raise ProgramError(
                f"{part}: residual columns of row tiles {part.first} + {part.count}, EMBED of the same CTA has "
                f"{embed.first} + {embed.count}"
            )
