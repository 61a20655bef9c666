"""The checker lets every supported program pass on any GPU, and objects to each class of broken program by its name."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megakernel_runtime.kernels.shape import KernelShape
from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import Placement, Task, place
from megakernel_runtime.program.validate import Image, ProgramError, validate
from megakernel_runtime.program.validate.dataflow import check_dataflow
from megakernel_runtime.program.validate.structure import check_structure
from megakernel_runtime.program.validate.waits import check_waits
from megakernel_runtime.resident.layout import shape_of
from tests.program import untraced
from tests.program.executor.attention import span_count
from tests.program.images import image_of, model
from tests.program.sweep_programs import MODELS

OP, LAYER, FIRST, COUNT, SOURCE, TARGET, COLUMNS, WIDTH, NORMED = range(9)


@pytest.fixture(scope="module")
def swept():
    """What the checker objects to in supported programs, by model."""
    return untraced.run("tests.program.sweep_programs", list(MODELS))


@pytest.mark.slow
@pytest.mark.timeout(400)  # the first waits for all
@pytest.mark.parametrize("name", MODELS)
def test_every_supported_program_is_clean(swept, name):
    """On any number of SMs, for both buckets."""
    assert swept[name] is None, swept[name]


@pytest.mark.parametrize("max_len", [1, 31, 256, 257, 8192, 40960, 131072])
@pytest.mark.parametrize("window", [None, 1, 100, 4096])
def test_any_context_length_is_clean(max_len, window):
    config = replace(MODELS["llama-3.2-1b"], sliding_window=window)
    assert validate(image_of(config, 132, 8, max_len=max_len)) is None


@given(
    grid=st.integers(1, 200),
    heads=st.integers(1, 12),
    ffn=st.integers(1, 900),
    vocab=st.integers(4000, 7000),
    rates=st.lists(st.floats(0.2, 5.0), min_size=200, max_size=200),
)
@settings(max_examples=40, deadline=None)
def test_any_placement_is_clean(grid, heads, ffn, vocab, rates):
    config = model("llama", heads * 64, 3, heads, heads, 64, ffn, vocab)
    image = image_of(config, grid, 8, placement=place(config, grid, rates[:grid]))
    assume(all(image.counts))
    assert validate(image) is None


def test_an_8b_model_takes_less_than_two_seconds():
    image = image_of(MODELS["qwen3-8b"], 132, 16)
    begun = time.process_time()
    validate(image)
    assert time.process_time() - begun < 2


# ---------------------------------------------------------------- broken programs

CONFIG = model("llama", 512, 3, 8, 2, 64, 1024, 3000)
GRID, ROWS = 5, 8
GOOD = image_of(CONFIG, GRID, ROWS)
N = len(GOOD.placement.tasks[0])


def at(cta: int, op: Op, layer: int) -> int:
    """Index in `code` of a CTA's part of an instruction."""
    first, n = GOOD.meta[cta][2:]
    return next(i for i in range(first, first + n) if GOOD.code[i][:2] == (op, layer))


def words(op_: Op, layer_: int, *, ctas: range | tuple[int, ...] = range(GRID), **changes: int) -> Image:
    """The good image with words of an instruction changed by so much, on some CTAs."""
    code = list(GOOD.code)
    for cta in ctas:
        i = at(cta, op_, layer_)
        new = list(code[i])
        for name, by in changes.items():
            new[globals()[name.upper()]] += by
        code[i] = tuple(new)
    return replace(GOOD, code=code)


def moved(ctas: range | tuple[int, ...], move: Callable[[list[tuple[int, ...]], list[Task]], None]) -> Image:
    """The good image with the instruction lists of some CTAs rearranged, and their tasks likewise: tape runs fit."""
    code: list[tuple[int, ...]] = []
    meta: list[tuple[int, ...]] = []
    tasks: list[tuple[Task, ...]] = []
    for cta in range(GRID):
        first, n = GOOD.meta[cta][2:]
        own, todo = list(GOOD.code[first : first + n]), list(GOOD.placement.tasks[cta])
        if cta in ctas:
            move(own, todo)
        meta.append((*GOOD.meta[cta][:2], len(code), len(own)))
        code += own
        tasks.append(tuple(todo))
    return replace(GOOD, code=code, meta=meta, placement=Placement(GRID, tuple(tasks)))


def swap(i: int, j: int) -> Callable[[list[tuple[int, ...]], list[Task]], None]:
    def move(own: list[tuple[int, ...]], todo: list[Task]) -> None:
        for items in (own, todo):
            items[i], items[j] = items[j], items[i]

    return move


def drop(i: int) -> Callable[[list[tuple[int, ...]], list[Task]], None]:
    def move(own: list[tuple[int, ...]], todo: list[Task]) -> None:
        del own[i], todo[i]

    return move


def double(i: int) -> Callable[[list[tuple[int, ...]], list[Task]], None]:
    def move(own: list[tuple[int, ...]], todo: list[Task]) -> None:
        own.insert(i, own[i])
        todo.insert(i, todo[i])

    return move


def tile_given_away(op: Op, *, twice: bool) -> Image:
    """CTA 1 leaves its last row tile of layer 1 out, or takes its neighbour's first too; its tape run is as long."""
    by = 1 if twice else -1
    tasks = [list(own) for own in GOOD.placement.tasks]
    i = next(i for i, task in enumerate(tasks[1]) if (task.op, task.layer) == (op, 1))
    tasks[1][i] = replace(tasks[1][i], count=tasks[1][i].count + by)
    return image_of(CONFIG, GRID, ROWS, placement=Placement(GRID, tuple(map(tuple, tasks))))


class Changed(KernelShape):
    """A kernel shape with some derived numbers changed: fields `changes` by name."""

    def __getattribute__(self, name: str):
        changes = object.__getattribute__(self, "__dict__").get("changes", {})
        return changes[name] if name in changes else object.__getattribute__(self, name)


def shape(**changes: object) -> Image:
    """The good image with other numbers for the kernel; instruction words stay."""
    changed = Changed(**{name: getattr(GOOD.shape, name) for name in KernelShape.__dataclass_fields__})
    object.__setattr__(changed, "changes", changes)
    return replace(GOOD, shape=changed)


def owner_of(layer: int) -> Image:
    """CTAs 1 and 2 change places in one OUT, so that every row tile still has one CTA."""
    tasks = [list(own) for own in GOOD.placement.tasks]
    i = next(i for i, task in enumerate(tasks[1]) if (task.op, task.layer) == (Op.OUT, layer))
    tasks[1][i], tasks[2][i] = tasks[2][i], tasks[1][i]
    return image_of(CONFIG, GRID, ROWS, placement=Placement(GRID, tuple(map(tuple, tasks))))


QKV_WIDTH = GOOD.shape.qkv
HIDDEN = ROWS * GOOD.shape.hidden
BROKEN = {
    # lists and tape runs
    "more CTAs than SMs": (lambda: replace(GOOD, sms=4), "resident at once"),
    "no CTA": (lambda: shape(grid=0), "resident at once"),
    "more CTAs than samplers look at": (lambda: replace(shape(grid=257), sms=300), "256 CTAs"),
    "numbered by SM, some SMs left out": (lambda: replace(shape(by_sm=True), sms=9), "all 9 SMs"),
    "a CTA without meta": (lambda: replace(GOOD, meta=GOOD.meta[:-1]), "meta: for 4 CTAs"),
    "a surplus word of meta": (
        lambda: replace(GOOD, meta=[(*GOOD.meta[0], 0), *GOOD.meta[1:]]),
        "meta of CTA 0: 5 words",
    ),
    "a task that no instruction does": (
        lambda: replace(GOOD, placement=Placement(GRID, tuple((*own, own[-1]) for own in GOOD.placement.tasks))),
        f"CTA 0: {N} instructions, the placement has {N + 1}",
    ),
    "lists overlap": (
        lambda: replace(GOOD, meta=[*GOOD.meta[:2], (*GOOD.meta[2][:2], 2 * N - 1, N), *GOOD.meta[3:]]),
        f"CTA 2: its {N} instructions start at {2 * N - 1}",
    ),
    "code that no CTA runs": (lambda: replace(GOOD, code=[*GOOD.code, GOOD.code[0]]), "lists of instructions end"),
    "an unknown opcode": (lambda: words(Op.EMBED, 0, ctas=(3,), op=77), "CTA 3, instruction 0: 77 is no opcode"),
    "a surplus word": (
        lambda: replace(GOOD, code=[(*GOOD.code[0][:9], 1, 0, 0), *GOOD.code[1:]]),
        "CTA 0, instruction 0",
    ),
    "an instruction left out": (lambda: moved((2,), drop(3)), "CTA 2: OUT of layer 0 is missing"),
    "an instruction twice": (lambda: moved((2,), double(3)), r"OUT of layer 0 \(CTA 2, instruction 4\).*twice"),
    "two instructions swapped on one CTA": (
        lambda: moved((1,), swap(2, 3)),
        r"OUT of layer 0 \(CTA 1, instruction 2\): CTA 0 has ATTEND of layer 0 here",
    ),
    "a signal before the work": (lambda: moved(range(GRID), swap(N - 2, N - 1)), "comes after SAMPLE"),
    "a signal dropped": (lambda: moved((4,), drop(N - 1)), "CTA 4: SAMPLE of layer 0 is missing"),
    "a signal twice": (lambda: moved((4,), double(N - 1)), "SAMPLE of layer 0.*twice"),
    "other tiles than were packed": (
        lambda: words(Op.QKV, 1, ctas=(1,), first=1),
        r"QKV of layer 1 \(CTA 1.*tape was packed",
    ),
    "fewer tiles than were packed": (lambda: words(Op.QKV, 1, ctas=(1,), count=-1), "tape was packed"),
    "less than no tiles": (
        lambda: words(Op.QKV, 1, ctas=(1,), count=-99),
        r"QKV of layer 1 \(CTA 1.*: -9\d row tiles from",
    ),
    "a tape run too short": (
        lambda: replace(
            GOOD,
            counts=(GOOD.counts[0] - 1, *GOOD.counts[1:]),
            meta=[(GOOD.starts[0], GOOD.counts[0] - 1, *GOOD.meta[0][2:]), *GOOD.meta[1:]],
        ),
        f"CTA 0: its instructions take {GOOD.counts[0]} tiles",
    ),
    "tape runs overlap": (
        lambda: replace(
            GOOD,
            starts=(0, GOOD.starts[1] - 1, *GOOD.starts[2:]),
            meta=[GOOD.meta[0], (GOOD.starts[1] - 1, *GOOD.meta[1][1:]), *GOOD.meta[2:]],
        ),
        "CTA 1: its tape run starts at",
    ),
    "meta and tape disagree": (lambda: replace(GOOD, starts=(1, *GOOD.starts[1:])), "CTA 0: meta says"),
    "a tape too short": (lambda: replace(GOOD, tape_tiles=GOOD.tape_tiles - 1), "the tape has"),
    # activations
    "a row tile that nobody computes": (lambda: tile_given_away(Op.QKV, twice=False), "QKV of layer 1.*by nobody"),
    "a row tile that two compute": (lambda: tile_given_away(Op.GATE_UP, twice=True), "GATE_UP of layer 1.*twice"),
    "a logits tile that nobody computes": (
        lambda: image_of(
            CONFIG,
            GRID,
            ROWS,
            placement=Placement(
                GRID,
                tuple(
                    (*own[:-2], replace(own[-2], count=own[-2].count - (c == 4)), own[-1])
                    for c, own in enumerate(GOOD.placement.tasks)
                ),
            ),
        ),
        "LM_HEAD of layer 3.*row tiles end at 187, the matrix has 188",
    ),
    "one CTA writes elsewhere": (
        lambda: words(Op.DOWN, 1, ctas=(3,), target=64),
        r"DOWN of layer 1 \(CTA 3.*other buffers",
    ),
    "a buffer written twice": (lambda: words(Op.DOWN, 1, target=-HIDDEN), "overlaps"),
    "buffers that overlap": (lambda: words(Op.GATE_UP, 0, target=-8), "overlaps"),
    "a buffer beyond the end": (lambda: words(Op.GATE_UP, 2, target=8), "ends at"),
    "a buffer out of line": (lambda: words(Op.GATE_UP, 2, target=-4), "multiples of 8"),
    "queries where attention does not look": (lambda: words(Op.QKV, 1, target=8), "ATTEND reads rows"),
    "a read of what nobody writes": (lambda: words(Op.GATE_UP, 1, source=8), "no instruction writes a buffer there"),
    "a read of another layer's": (lambda: words(Op.GATE_UP, 1, source=-HIDDEN), "needs the output of OUT of layer 1"),
    "a read of the next layer's": (lambda: words(Op.QKV, 1, source=HIDDEN), "needs the output of DOWN of layer 0"),
    "a read of the other parity": (
        lambda: words(Op.OUT, 1, source=GOOD.shape.step_elements),
        "OUT of layer 1.*no instruction writes",
    ),
    "a norm left out": (lambda: words(Op.GATE_UP, 1, normed=-1), "GATE_UP of layer 1.*normed: 0, should be: 1"),
    "a norm where there is none": (lambda: words(Op.OUT, 0, normed=1), "OUT of layer 0.*normed: 1, should be: 0"),
    "a producer without tiles at the tape's end": (
        lambda: image_of(model("llama", 64, 1, 1, 1, 64, 64, 16), 60, ROWS),
        r"CTA \d+ has no tiles: its producer would fill the ring from tile 29 on",
    ),
    "a read of narrower rows": (
        lambda: words(Op.DOWN, 1, source=GOOD.shape.at_mid - GOOD.shape.at_act + HIDDEN - ROWS * GOOD.shape.ffn),
        "DOWN of layer 1.*in rows of 1024, but rows of the output of OUT of layer 1.*have 512",
    ),
    "rows of another width": (lambda: words(Op.DOWN, 1, columns=-64), "960 columns; the matrix has 1024"),
    "results in rows of another width": (lambda: words(Op.OUT, 1, width=64), "width 576"),
    "a residual column of two CTAs": (lambda: owner_of(1), r"OUT of layer 1 \(CTA [12].*residual columns"),
    # waits
    "attention before its queries": (lambda: moved(range(GRID), swap(1, 2)), "waits go in a circle: .*QKV of layer 0"),
    "a layer before the one before": (lambda: moved(range(GRID), swap(4, 9)), "waits go in a circle"),
    # numbers
    "a shape of another model": (lambda: shape(hidden=576), "hidden is 576, the model's is 512"),
    "a window that the model lacks": (lambda: shape(window=64), "window is 64"),
    "an unknown bucket": (lambda: shape(rows=12), "rows is 12"),
    "heads of 96": (
        lambda: image_of(replace(CONFIG, head_dim=96, hidden_size=768), GRID, ROWS),
        "head_dim is 96",
    ),
    "too many query heads a key head": (
        lambda: image_of(replace(CONFIG, n_heads=18, hidden_size=1152), GRID, ROWS),
        "9 query heads share",
    ),
    "query heads that key heads do not divide": (
        lambda: image_of(replace(CONFIG, n_heads=9), GRID, ROWS),
        "4 x 2 query heads of 64 do not make a width of 576",
    ),
    "no layers": (lambda: image_of(replace(CONFIG, n_layers=0), GRID, ROWS), "layers: 0"),
    "no slots": (lambda: shape(slots=0), "none may be 0"),
    "a ring of one slot": (lambda: shape(stages=1), "stand still"),
    "a ring too large": (lambda: shape(stages=14), "shared memory"),
    "pages of 24 tokens": (lambda: shape(page=24), "power of two"),
    "a page table too short": (lambda: shape(max_pages=GOOD.shape.max_pages - 1), "page tables of 127 pages"),
    "page tables in the stop masks": (lambda: shape(stops_at=GOOD.shape.stops_at - 1), "page tables end"),
    "page tables in the fields": (lambda: shape(pages_at=0), "overlap"),
    "activations beyond 32 bits": (lambda: shape(step_elements=1 << 30), "32-bit offsets"),
    "spans of nothing": (lambda: shape(span=0, max_units=999, partial_words=10**6), "spans of 0"),
    "too few attention units": (lambda: shape(max_units=ROWS * 2 * 15), "room for 240"),
    "partial results too short": (lambda: shape(partial_words=1000), "the buffer has 1000"),
    "activations too short": (lambda: shape(step_elements=GOOD.shape.step_elements - 1), "ends at"),
    "attention's output elsewhere": (lambda: shape(at_attn=GOOD.shape.at_attn - 8), "overlaps"),
}


def test_the_program_that_is_broken_below_is_good():
    assert validate(GOOD) is None
    assert validate(shape()) is None
    assert validate(words(Op.QKV, 1)) is None
    assert validate(moved((), drop(0))) is None


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_are_refused_by_name(name):
    broken, message = BROKEN[name]
    with pytest.raises(ProgramError, match=message):
        validate(broken())


def test_no_word_of_any_instruction_can_change_unnoticed():
    """Each of the nine words of each instruction, on one CTA and on all, up and down."""
    ignored = {
        Op.EMBED: {SOURCE, TARGET, COLUMNS, WIDTH},  # compiled in
        Op.ATTEND: {FIRST, COUNT, SOURCE, TARGET, COLUMNS, WIDTH},
        Op.SAMPLE: {FIRST, COUNT, SOURCE, TARGET, COLUMNS, WIDTH},
        Op.LM_HEAD: {TARGET, WIDTH},
    }
    names = {
        value: name for name, value in globals().items() if name.isupper() and value in range(9) and name != "ROWS"
    }
    for task in GOOD.placement.tasks[0]:
        for word in set(range(9)) - ignored.get(task.op, set()):
            for by in (-1, 8):
                for ctas in (range(GRID), (2,)):
                    with pytest.raises(ProgramError):
                        validate(words(task.op, task.layer, ctas=ctas, **{names[word].lower(): by}))


def test_partial_results_of_layers_that_do_not_depend_on_each_other_are_refused():
    regions = check_dataflow(GOOD, check_structure(GOOD))
    independent = check_structure(words(Op.QKV, 1, source=-HIDDEN))
    with pytest.raises(ProgramError, match=r"QKV of layer 1 .* does not depend on attention of layer 0"):
        check_waits(independent, regions)


@given(
    grid=st.integers(1, 188),
    positions=st.lists(st.integers(0, 8191), min_size=1, max_size=8),
    window=st.sampled_from([0, 1, 300, 4096]),
)
@settings(max_examples=25, deadline=None)
def test_attention_units_cover_every_row_head_and_span_once(grid, positions, window):
    """The kernel's rule, units and joins of CTA c being c, c + G, ..., with the checker's bound on units."""
    config = replace(MODELS["qwen2.5-0.5b"], sliding_window=window or None)
    kernel = image_of(config, grid, 8, max_len=8192).shape
    spans = [span_count(kernel, position)[0] for position in positions]
    dealt = [u for c in range(grid) for u in range(c, len(positions) * 2 * max(1, *spans), grid)]
    assert len(dealt) <= kernel.max_units
    units = [(u // 2 % len(positions), u % 2, u // (2 * len(positions))) for u in dealt]
    done = sorted((t, head, j) for t, head, j in units if j < max(spans[t], 1))
    assert done == [(t, head, j) for t in range(len(positions)) for head in range(2) for j in range(max(spans[t], 1))]


def test_shape_of_a_start_is_what_is_checked():
    """The checker's idea of a shape is the kernel's own class."""
    checked = shape_of(CONFIG, rows=8, grid=3, slots=2, n_pages=9, max_len=100)
    assert validate(image_of(CONFIG, 3, 8, shape=checked)) is None
