"""The runtime `megakernel` over a simulated kernel: routing, leases, faults."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel_runtime.backends.graphs.load import host_device, make_parts
from megakernel_runtime.backends.megakernel.accounts import States
from megakernel_runtime.backends.megakernel.resident import ResidentRunner
from megakernel_runtime.backends.megakernel.runtime import MegakernelRuntime
from megakernel_runtime.interface import Capacity, PrefillRow, RuntimeFault, SlotAdmit
from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.weights.load import load_weights
from tests.program.programs import ignore_progress
from tests.unit.backends.contract import (
    MAX_LEN,
    MAX_SLOTS,
    MAX_STEP_TOKENS,
    N_PAGES,
    PAGE,
    PROMPT,
    Contract,
    Driver,
    greedy,
    pages_of,
    tokens_of,
)
from tests.unit.backends.megakernel.kernel import Kernel


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("qwen3", seed=3, num_hidden_layers=2).save_pretrained(path)
    config = read_config(path)
    return config, load_weights(path, config, progress=ignore_progress)


class NoClocks:
    """Accounts of a kernel that keeps none: all time that is not the graphs' own is taken for parked."""

    def __init__(self):
        self.began_ns = time.monotonic_ns()

    def read(self, now_ns, elsewhere_ns):
        return States(compute_ns=elsewhere_ns, parked_ns=now_ns - self.began_ns - elsewhere_ns)


def make(model, *, chunks=False, faults=()):
    config, weights = model
    capacity = Capacity(MAX_SLOTS, N_PAGES, PAGE, MAX_LEN, MAX_STEP_TOKENS, 32, 2, config.vocab_size)
    parts = make_parts(host_device(), config, weights, capacity, torch.float32, ignore_progress, captures=False)
    kernel = Kernel(parts, faults=faults)
    runner = ResidentRunner(kernel, parts.slots, parts.tables.state)
    runtime = MegakernelRuntime(
        kernel,
        runner,
        parts.runtime,
        capacity,
        parts.runtime.info,
        NoClocks(),
        max_rows=8,
        chunks=chunks,
        step_bytes=100,
        token_bytes=10,
        kernels_per_step=7,
    )
    return Driver(runtime), kernel


def make_graphs(model):
    """The graphs runtime alone."""
    config, weights = model
    capacity = Capacity(MAX_SLOTS, N_PAGES, PAGE, MAX_LEN, MAX_STEP_TOKENS, 32, 2, config.vocab_size)
    parts = make_parts(host_device(), config, weights, capacity, torch.float32, ignore_progress, captures=False)
    return Driver(parts.runtime)


class TestSimulated(Contract):
    @pytest.fixture(params=[False, True], ids=["single rows", "chunks"])
    def driver(self, model, request):
        driver, _ = make(model, chunks=request.param)
        yield driver
        driver.runtime.close()


def life(driver, **sampling):
    """Tokens of a slot: a first one, then a lease, then single steps."""
    first = driver.start(0, sampling=greedy(**sampling)).token
    return [first, *tokens_of(driver.run(decode=(0,), lease_steps=6), 0), *driver.decode(0, 3)]


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("step", range(1, 9))
def test_after_a_fault_the_tokens_are_the_same(model, chunks, step):
    expected = life(make(model, chunks=chunks)[0])
    driver, kernel = make(model, chunks=chunks, faults=(step,))
    assert life(driver) == expected
    assert driver.runtime.telemetry().wait_timeouts == 1
    assert driver.runtime.telemetry().fallbacks == {}
    assert kernel.launches["fault"] == 1


@pytest.mark.parametrize("faults", [(2, 3), (2, 5), (4, 5)])
def test_after_two_faults_graphs_go_on(model, faults):
    expected = life(make(model)[0])
    driver, kernel = make(model, faults=faults)
    first = driver.start(0).token
    lease = driver.run(decode=(0,), lease_steps=6)
    assert [r.step_index for r in lease] == list(range(len(lease)))
    assert [r.last for r in lease] == [False] * (len(lease) - 1) + [True]
    tokens = [first, *tokens_of(lease, 0)]
    tokens += driver.decode(0, len(expected) - len(tokens))
    assert tokens == expected
    telemetry = driver.runtime.telemetry()
    assert (telemetry.wait_timeouts, telemetry.fallbacks) == (2, {"wait_timeout": 1})
    assert not kernel.resident


def test_a_lease_is_cut_once_by_a_plan_for_graphs(model):
    driver, kernel = make(model)
    driver.start(0)
    driver.submit(decode=(0,), lease_steps=30)
    results = driver.poll()
    before, kernel.n_stalls = kernel.n_cuts, 3
    prompt = tuple(range(1, 13))
    new = driver.submit(
        admits=(SlotAdmit(1, prompt, 12, greedy(), pages=pages_of(1)),), prefill=(PrefillRow(1, 0, 12),)
    )
    results += driver.finish(new)
    assert kernel.n_cuts == before + 1
    assert len(tokens_of(results, 0)) < 30
    assert [r.plan_id for r in results] == sorted(r.plan_id for r in results)


def test_slots_that_are_not_plain_run_on_graphs(model):
    driver, kernel = make(model, chunks=True)
    driver.start(0, sampling=greedy(presence_penalty=0.5))
    driver.decode(0, 3)
    assert kernel.n_steps == 0
    driver.start(1)
    assert kernel.n_steps == 1
    assert driver.runtime.telemetry().kernels_avoided == 7


def test_a_closed_runtime_takes_nothing(model):
    driver, _ = make(model)
    driver.runtime.close()
    with pytest.raises(RuntimeFault):
        driver.start(0, PROMPT)


def test_tokens_that_graphs_chose_are_what_the_kernel_goes_on_from(model):
    expected = life(make(model, chunks=True)[0])
    driver, kernel = make(model)
    first = driver.start(0).token  # of several rows: on graphs
    assert kernel.n_steps == 0
    assert [first, *tokens_of(driver.run(decode=(0,), lease_steps=6), 0), *driver.decode(0, 3)] == expected
    assert kernel.n_steps == 9


def test_a_penalised_slot_survives_faults_of_its_neighbour(model):
    def run(driver):
        tokens = [[driver.start(0, sampling=greedy(presence_penalty=0.9)).token], [driver.start(1).token]]
        for slots in ((1,), (0,), (0, 1), (1,), (0,)):
            results = driver.run(decode=slots, lease_steps=1)
            for slot in (0, 1):
                tokens[slot] += tokens_of(results, slot)
        return tokens

    expected = run(make(model)[0])
    for faults in ((1,), (2,), (1, 2), (1, 3)):
        driver, _ = make(model, faults=faults)
        assert run(driver) == expected
        assert driver.runtime.telemetry().wait_timeouts == len(faults)


ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=8)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(ACTIONS, st.sets(st.integers(1, 25), max_size=2), st.booleans())
def test_random_lives_give_the_tokens_of_undisturbed_ones(model, actions, faults, chunks):
    """Each action starts a free slot with a prompt of so many tokens, or decodes all for so many steps and, of an odd
    number, then releases the slot.
    """

    def live(driver):
        tokens: dict[int, list[int]] = {}
        lives = []
        for slot, n in actions:
            if slot not in tokens:
                tokens[slot] = [driver.start(slot, PROMPT[:n]).token]
                continue
            results = driver.run(decode=tuple(tokens), lease_steps=n)
            for index, known in tokens.items():
                known.extend(tokens_of(results, index))
            if n % 2:
                lives.append(tokens.pop(slot))
                driver.run(releases=(slot,))
        return lives, tokens

    driver, _ = make(model, chunks=chunks, faults=faults)
    reference = make_graphs(model)
    longer, running = live(driver)
    finished, going = live(reference)
    pairs = [*zip(longer, finished, strict=True), *((running[slot], going[slot]) for slot in going)]
    for ours, theirs in pairs:
        assert ours == theirs


def test_a_slot_is_given_away_while_its_lease_runs(model):
    driver, _ = make(model, chunks=True)
    expected = driver.start(0, (4, 5, 6)).token
    driver.run(releases=(0,))
    driver.start(0)
    driver.submit(decode=(0,), lease_steps=30)
    admits = (SlotAdmit(0, (4, 5, 6), 3, greedy(), pages=pages_of(0)),)
    new = driver.submit(releases=(0,), admits=admits, prefill=(PrefillRow(0, 0, 3),))
    results = driver.finish()
    assert [t.token for r in results if r.plan_id == new for t in r.tokens] == [expected]


def test_plans_without_rows_are_answered_in_their_turn(model):
    driver, _ = make(model)
    driver.start(0)
    driver.submit(decode=(0,), lease_steps=8)
    empty = driver.submit()
    *of_lease, last = driver.finish()
    assert (last.plan_id, last.last, last.n_rows) == (empty, True, 0)
    assert [r.last for r in of_lease] == [False] * (len(of_lease) - 1) + [True]
