"""The hand-over protocol under weak memory: over a thousand random schedules give the reference's result, mutants do not.

What is executed are the very artefacts of a start: instruction words, tape runs, tiles as the tape has them.
"""

from dataclasses import fields, replace

import numpy as np
import pytest

from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import Placement, place
from megakernel_runtime.program.validate.dataflow import check_dataflow
from megakernel_runtime.program.validate.structure import check_structure
from megakernel_runtime.program.validate.waits import check_waits
from tests.program import untraced
from tests.program.executor.memory import EMPTY, Deadlock, Memory, ProtocolError, Race, Stale
from tests.program.executor.rules import Rules
from tests.program.executor.run import run_schedule
from tests.program.executor.scenes import MODELS, Scene, tiny_shape, weights_of, world_of
from tests.program.executor.sweep import SCHEDULES, check
from tests.program.executor.world import World


def test_there_are_enough_schedules():
    assert sum(SCHEDULES.values()) >= 1000


@pytest.fixture(scope="module")
def swept():
    """What went wrong in the schedules, by model and grid."""
    return untraced.run("tests.program.executor.sweep", list(SCHEDULES))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_executed_passes_the_static_checker(name):
    for grid in (1, 2, 3, 4, 6):
        image = world_of(name, grid).image
        parts = check_structure(image)
        assert check_waits(parts, check_dataflow(image, parts)) is None


@pytest.mark.slow
@pytest.mark.timeout(400)  # the first waits for all
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_schedules_give_the_references_result(swept, name):
    assert swept[name] is None, swept[name]


def test_a_seed_is_one_schedule():
    world = world_of("llama", 3)
    runs = []
    for seed in (5, 6, 5):
        run_schedule(world, Scene("llama", 5).plans, seed)
        runs.append([(s.sequence, s.position, s.token) for s in world.sampled])
    assert runs[0] == runs[2]


# ---------------------------------------------------------------- mutants

# What stops each broken rule, at the latest. Stopped is also who gets a wrong result.
CAUGHT_BY = {
    "empties": Stale,
    "empties_in_time": Deadlock,
    "clears_rows": Stale,
    "writes_own_parity": Deadlock,
    "reads_own_parity": Deadlock,
    "heads_signal_after_stores": Race,
    "done_signals_after_work": Race,
    "heads_signal": Deadlock,
    "done_signals": Deadlock,
    "releases": Race,
    "acquires": Race,
    "heads_missing": Race,
    "done_missing": Race,
    "begins_when_published": Race,
    "begins_when_done": Race,
    "units_before_joins": Deadlock,
    "marks_layers": Stale,
    "checks_marks": Stale,
    "new_keys_from_words": Race,
    "dead_rows_keep_off": AssertionError,
    "writes_taken_late": Race,
    "host_waits_for_room": Race,
}
TRIES = 60


def test_every_rule_has_a_mutant():
    assert set(CAUGHT_BY) == {rule.name for rule in fields(Rules)}


@pytest.mark.parametrize("rule", CAUGHT_BY)
def test_a_broken_rule_is_caught(rule):
    """Within few schedules something stops each mutant, and what is expected is among it."""
    broken = replace(
        Rules(), **{rule: 1 if isinstance(getattr(Rules(), rule), int) and not getattr(Rules(), rule) else False}
    )
    caught = set()
    for seed in range(TRIES):
        name = ("llama", "mistral")[seed % 2]
        same = {}
        try:
            run_schedule(world_of(name, 3), Scene(name, seed).plans, seed, broken)
            check(world_of(name, 3), name, same)
        except (ProtocolError, AssertionError) as error:
            caught.add(type(error))
        if CAUGHT_BY[rule] in caught:
            return
    pytest.fail(f"caught by {caught} only")


GRID = 3


def rewritten(change):
    """A world whose instruction words are changed after the tape was packed."""
    world = World(MODELS["llama"], weights_of("llama"), tiny_shape("llama", GRID))
    code = [list(words) for words in world.image.code]
    change(code, world.image)
    world.image = replace(world.image, code=[tuple(words) for words in code])
    return world


def index(image, cta, op, layer):
    first, n = image.meta[cta][2:]
    return next(i for i in range(first, first + n) if image.code[i][:2] == (op, layer))


def swap_instructions(code, image):
    """CTA 1 runs OUT before ATTEND."""
    i, j = index(image, 1, Op.ATTEND, 1), index(image, 1, Op.OUT, 1)
    code[i], code[j] = code[j], code[i]


def sample_before_head(code, image):
    """CTA 1 signals before its LM head."""
    i, j = index(image, 1, Op.LM_HEAD, 2), index(image, 1, Op.SAMPLE, 0)
    code[i], code[j] = code[j], code[i]


def same_buffer(code, image):
    """DOWN of layer 0 writes where EMBED did, and is read there."""
    for cta in range(GRID):
        code[index(image, cta, Op.DOWN, 0)][5] = 0
        code[index(image, cta, Op.QKV, 1)][4] = 0


def other_layer(code, image):
    """GATE_UP of layer 1 reads what that of layer 0 does."""
    for cta in range(GRID):
        code[index(image, cta, Op.GATE_UP, 1)][4] = code[index(image, cta, Op.GATE_UP, 0)][4]


def signal_left_out(code, image):
    """CTA 2 has no SAMPLE: it is another EMBED, of no columns."""
    code[index(image, 2, Op.SAMPLE, 0)][:4] = [Op.EMBED, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (swap_instructions, (Deadlock,)),
        (sample_before_head, (Race,)),
        (same_buffer, (AssertionError, Race, Stale, Deadlock)),
        (other_layer, (AssertionError,)),
        (signal_left_out, (Deadlock,)),
    ],
)  # fmt: skip
def test_broken_instruction_words_are_caught(change, kinds):
    world = rewritten(change)
    with pytest.raises(kinds):
        run_some(world)


def run_some(world):
    same = {}
    for seed in range(20):
        run_schedule(world, Scene("llama", seed).plans, seed)
        check(world, "llama", same)


def test_a_row_tile_that_nobody_computes_is_waited_for_in_vain():
    config, shape = MODELS["llama"], tiny_shape("llama", GRID)
    tasks = [list(own) for own in place(config, GRID).tasks]
    i = next(i for i, task in enumerate(tasks[2]) if (task.op, task.layer) == (Op.QKV, 1))
    tasks[2][i] = replace(tasks[2][i], count=tasks[2][i].count - 1)
    world = World(config, weights_of("llama"), shape, Placement(GRID, tuple(map(tuple, tasks))))
    with pytest.raises(Deadlock):
        run_some(world)


def test_a_residual_column_that_changes_hands_is_a_race():
    config, shape = MODELS["llama"], tiny_shape("llama", 4)
    tasks = [list(own) for own in place(config, 4).tasks]
    i = next(i for i, task in enumerate(tasks[1]) if (task.op, task.layer) == (Op.OUT, 1))
    tasks[1][i], tasks[2][i] = tasks[2][i], tasks[1][i]
    with pytest.raises(Race):
        run_some(World(config, weights_of("llama"), shape, Placement(4, tuple(map(tuple, tasks)))))


def test_weights_of_another_tape_run_give_a_wrong_result():
    world = World(MODELS["llama"], weights_of("llama"), tiny_shape("llama", 2))
    one, other = (0, Op.OUT, 1), (1, Op.OUT, 1)
    world.matrices[one], world.matrices[other] = world.matrices[other], world.matrices[one]
    with pytest.raises(AssertionError):
        run_some(world)


# ---------------------------------------------------------------- the memory itself

WORDS = np.arange(2)


def memory(seed):
    made = Memory(np.full(2, EMPTY, dtype=np.uint64), cells=2, counters=2, threads=3, depth=8)
    made.reset(seed)
    return made


def outcomes(litmus):
    """All outcomes of a litmus test over many seeds."""
    return {litmus(memory(seed)) for seed in range(300)}


def test_relaxed_stores_become_visible_in_any_order():
    def litmus(m):
        m.write(0, WORDS[:1], 1, 0)
        m.write(0, WORDS[1:], 2, 0)
        second, _ = m.read(1, WORDS[1:], newest=False)
        first, _ = m.read(1, WORDS[:1], newest=False)
        return int(first[0]), int(second[0])

    assert outcomes(litmus) == {(1, 2), (EMPTY, 2), (1, EMPTY), (EMPTY, EMPTY)}


def test_what_was_released_is_visible_to_who_acquired_it():
    def litmus(m, release=True, acquire=True):
        m.write(0, WORDS[:1], 1, 0)
        m.count(0, 0, release=release)
        m.count(2, 0)  # another's signal hands on what the first released
        n = m.look(1, 0, newest=False, acquire=acquire)
        value, _ = m.read(1, WORDS[:1], newest=False)
        return n, int(value[0])

    assert outcomes(litmus) == {(0, 1), (0, EMPTY), (1, 1), (2, 1)}
    assert (2, EMPTY) in outcomes(lambda m: litmus(m, release=False))
    assert (2, EMPTY) in outcomes(lambda m: litmus(m, acquire=False))


def test_who_has_read_a_value_never_reads_an_older_one():
    def litmus(m):
        for value in (1, 2, 3):
            m.write(0, WORDS[:1], value, 0)
        seen = [int(m.read(1, WORDS[:1], newest=False)[0][0]) for _ in range(3)]
        return tuple({EMPTY: 0}.get(value, value) for value in seen)

    found = outcomes(litmus)
    assert all(seen == tuple(sorted(seen)) for seen in found)
    assert len(found) >= 6
    assert (1, 2, 3) in found


def test_unordered_plain_accesses_are_races():
    def ordered(m, first, second, between):
        first(0, 0)
        if between:
            m.count(0, 0)
            m.look(1, 0, newest=True)
        second(1, 0)

    for kinds in (("plain_write", "plain_read"), ("plain_read", "plain_write"), ("plain_write", "plain_write")):
        m = memory(0)
        ordered(m, getattr(m, kinds[0]), getattr(m, kinds[1]), between=True)
        m = memory(0)
        with pytest.raises(Race):
            ordered(m, getattr(m, kinds[0]), getattr(m, kinds[1]), between=False)
    m = memory(0)
    m.plain_read(0, 0)
    m.plain_read(1, 0)
    m.write(0, WORDS[:1], 1, 0)
    with pytest.raises(Race):
        m.write(1, WORDS[:1], 2, 0)
