"""The megakernel backend on a GPU of compute capability 9.0: the runtime contract, tokens against an oracle, residency.

`pytest tests/kernel/test_megakernel_gpu.py` takes a few minutes, most of it compiling; it needs Triton and no network.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace

import pytest
import torch

from megakernel_runtime.backends.megakernel.load import make_megakernel, megakernel_device
from megakernel_runtime.interface import (
    Capacity,
    CapacityError,
    PrefillRow,
    RuntimeSpec,
    SamplingParams,
    SlotAdmit,
    StepPlan,
)
from megakernel_runtime.models.config import RopeScaling
from megakernel_runtime.weights.random_weights import random_weights
from tests.kernel.oracle import greedy_gaps
from tests.program.programs import ignore_progress
from tests.unit.backends.contract import (
    MAX_LEN,
    MAX_SLOTS,
    MAX_STEP_TOKENS,
    N_PAGES,
    PAGE,
    Contract,
    Driver,
    greedy,
    tokens_of,
)
from tests.unit.backends.graphs.scenes import TINY

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LLAMA = replace(
    TINY,
    vocab_size=1000,
    hidden_size=256,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    ffn_size=320,
    max_position=16384,
)
# between them: group sizes 1 to 7, both head sizes, sizes that are no powers of two, an odd vocabulary, every extra
MODELS = {
    "llama": LLAMA,
    "smollm2": replace(LLAMA, vocab_size=49157, hidden_size=576, n_heads=9, n_kv_heads=3, ffn_size=1536),
    "llama-scaled-rope": replace(LLAMA, rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), n_kv_heads=4),
    "mistral-window": replace(LLAMA, architecture="mistral", sliding_window=50, head_dim=128, n_heads=4),
    "qwen2": replace(
        LLAMA, architecture="qwen2", qkv_bias=True, n_heads=7, n_kv_heads=1, hidden_size=448, ffn_size=100
    ),
    "qwen3": replace(LLAMA, architecture="qwen3", qk_norm=True, head_dim=128, n_heads=8, n_kv_heads=4),
    "wide": replace(LLAMA, hidden_size=2560, ffn_size=5120, n_layers=2),
}
PAGES_EACH = 64
SPEC = RuntimeSpec("megakernel", "", idle_park_ms=500)
PROMPTS = tuple(tuple((s * 31 + i * 7) % 1000 for i in range(n)) for s, n in enumerate((5, 1, 40, 17, 9, 3, 64, 30)))


def needs_the_gpu():
    """Skip on a GPU that the kernel is not made for."""
    try:
        return megakernel_device()
    except CapacityError as reason:
        pytest.skip(str(reason))


def loaded(config=LLAMA, *, max_slots=8, pages_each=PAGES_EACH, max_len=2048, **kw):
    """A runtime over random weights, its driver and the weights."""
    capacity = Capacity(max_slots, max_slots * pages_each, 32, max_len, 512, 32, 2, config.vocab_size)
    weights = random_weights(config, 0)
    device = needs_the_gpu()
    runtime = make_megakernel(device, config, weights, capacity, ignore_progress, kw.pop("spec", SPEC), **kw)
    return runtime, Driver(runtime), weights


def pages(slot, each=PAGES_EACH):
    """A slot's own pages, in falling order."""
    return tuple(reversed(range(slot * each, (slot + 1) * each)))


def served(driver, prompts=PROMPTS, n=24, lease=16):
    """Admit prompts one after the other while those before decode, no step of more than eight rows; return the tokens of
    each.
    """
    results, living = [], []
    for slot, prompt in enumerate(prompts):
        admits = (SlotAdmit(slot, prompt, len(prompt), greedy(n), pages=pages(slot)),)
        chunk = max(8 - len(living), 1)
        for start in range(0, len(prompt), chunk):
            rows = (PrefillRow(slot, start, min(chunk, len(prompt) - start)),)
            results += driver.run(admits=admits, prefill=rows, decode=tuple(living[:7]))
            admits = ()
        living.append(slot)
    while living:
        results += driver.run(decode=tuple(living), lease_steps=lease)
        ended = {t.slot for r in results for t in r.tokens if t.finish}
        living = [slot for slot in living if slot not in ended]
    driver.run(releases=tuple(range(len(prompts))))
    return [tokens_of(results, slot) for slot in range(len(prompts))]


# ---------------------------------------------------------------- the contract


class _Contract(Contract):
    chunks = False

    @pytest.fixture
    def driver(self):
        capacity = Capacity(MAX_SLOTS, N_PAGES, PAGE, MAX_LEN, MAX_STEP_TOKENS, 32, 2, LLAMA.vocab_size)
        weights = random_weights(LLAMA, 0)
        runtime = make_megakernel(needs_the_gpu(), LLAMA, weights, capacity, ignore_progress, SPEC, chunks=self.chunks)
        yield Driver(runtime)
        runtime.close()


class TestPromptsOnGraphs(_Contract):
    """As it is served: the kernel decodes, prompts run on the graphs backend."""


class TestPromptsInTheKernel(_Contract):
    """Chunks of up to eight rows run in the kernel."""

    chunks = True


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("chunks", [False, True], ids=["decode", "chunks"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_oracles_in_any_batch_and_again(name, chunks):
    """A token is right if its fp32 logit is the largest but for rounding: 0.1 standard deviations of the logits."""
    config = MODELS[name]
    runtime, driver, weights = loaded(config, chunks=chunks)
    together = served(driver)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        gaps, deviation = greedy_gaps(config, weights, list(prompt), tokens, "cuda")
        assert gaps.max().item() < 0.1 * deviation
    assert served(driver) == together
    if chunks:  # else prompts come from graphs, whose rounding depends on how many rows there are
        assert [served(driver, [prompt])[0] for prompt in PROMPTS] == together
    runtime.close()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window"])
def test_contexts_of_any_length(name):
    """From one token to 8,000: one span, two, many; windows that begin inside one."""
    config = MODELS[name]
    each = 256
    runtime, driver, weights = loaded(config, max_slots=4, pages_each=each, max_len=8192)
    for length in (1, 127, 128, 129, 255, 256, 257, 600, 3000, 8000):
        prompt = tuple((i * 7 + i // 50) % 1000 for i in range(length))
        results = []
        admits = (SlotAdmit(0, prompt, length, greedy(12), pages=pages(0, each)),)
        for start in range(0, length, 512):
            rows = (PrefillRow(0, start, min(512, length - start)),)
            results += driver.run(admits=admits, prefill=rows)
            admits = ()
        results += driver.run(decode=(0,), lease_steps=32)
        driver.run(releases=(0,))
        gaps, deviation = greedy_gaps(config, weights, list(prompt), tokens_of(results, 0), "cuda")
        assert len(gaps) == 12
        assert gaps.max().item() < 0.1 * deviation, f"context {length}"
    assert runtime.telemetry().steps[8, "decode"] > 100
    runtime.close()


def test_a_thousand_runs_give_the_same_tokens():
    runtime, driver, _ = loaded(chunks=True)
    first = served(driver, PROMPTS[:4], n=12, lease=32)
    assert all(served(driver, PROMPTS[:4], n=12, lease=32) == first for _ in range(1000))
    runtime.close()


# ---------------------------------------------------------------- residency


def test_the_kernel_keeps_its_pace_while_the_host_sleeps():
    runtime, driver, _ = loaded()
    driver.start(0, PROMPTS[6], greedy(500), pages=pages(0))
    driver.run(decode=(0,), lease_steps=32)
    driver.submit(decode=(0,), lease_steps=32)
    results = driver.poll()
    time.sleep(0.1)
    results += driver.finish()
    steps = [b.ended_ns - a.ended_ns for a, b in itertools.pairwise(results)]
    assert len(results) == 32
    assert max(steps) < 2 * statistics.median(steps), "a step waited for the host"
    assert runtime.telemetry().resident
    runtime.close()


def test_parks_when_idle_and_wakes():
    runtime, driver, _ = loaded()
    first = driver.start(0, PROMPTS[2], greedy(100), pages=pages(0)).token
    tokens = [first, *driver.decode(0, 3)]
    assert runtime.telemetry().resident
    end = time.monotonic() + 5
    while runtime.telemetry().resident and time.monotonic() < end:
        time.sleep(0.05)
    before = runtime.telemetry()
    assert not before.resident
    tokens += driver.decode(0, 3)
    after = runtime.telemetry()
    assert after.resident
    assert after.launches["resident", "wake"] == before.launches.get(("resident", "wake"), 0) + 1
    driver.run(releases=(0,))
    again = driver.start(0, PROMPTS[2], greedy(100), pages=pages(0)).token
    assert [again, *driver.decode(0, 6)] == tokens
    runtime.close()


def test_states_add_up_to_the_wall_time():
    runtime, driver, _ = loaded()
    driver.start(0, PROMPTS[2], greedy(2000), pages=pages(0))
    began, before = time.monotonic_ns(), runtime.telemetry()
    while time.monotonic_ns() - began < 1_000_000_000:
        driver.run(decode=(0,), lease_steps=32)
    time.sleep(1.2)  # waiting for the host, then parked
    after, wall = runtime.telemetry(), time.monotonic_ns() - began

    def spent(state):
        return getattr(after, state) - getattr(before, state)

    states = ("compute_ns", "wait_dependency_ns", "wait_memory_ns", "wait_host_ns", "parked_ns")
    assert sum(map(spent, states)) == pytest.approx(wall, rel=0.02)
    assert spent("parked_ns") > 0.2e9
    assert spent("wait_host_ns") > 0.2e9
    assert spent("compute_ns") > 0
    assert spent("wait_dependency_ns") > 0
    runtime.close()


def test_slots_are_released_and_taken_while_a_lease_runs():
    runtime, driver, weights = loaded()
    for slot in (0, 1):
        driver.start(slot, PROMPTS[slot + 2], greedy(400), pages=pages(slot))
    for turn in range(20):
        driver.submit(decode=(0, 1), lease_steps=32)
        prompt = PROMPTS[turn % 8]
        driver.submit(
            releases=(1,),
            admits=(SlotAdmit(1, prompt, len(prompt), greedy(400), pages=pages(1)),),
            prefill=(PrefillRow(1, 0, len(prompt)),),
            decode=(0,),
        )
        results = driver.finish()
        results = [r for r in results if r.plan_id == driver.plan_id]
        results += driver.run(decode=(0, 1), lease_steps=8)
        gaps, deviation = greedy_gaps(LLAMA, weights, list(prompt), tokens_of(results, 1), "cuda")
        assert gaps.max().item() < 0.1 * deviation
    runtime.close()


# ---------------------------------------------------------------- faults


def drop(runtime, step):
    """Make CTA 1 leave out its signal in a step of every launch from now on; 0: in none."""
    runtime._session.leave()
    runtime._session.memory.parts["abort"][8] = step


def test_a_lost_signal_costs_a_launch_and_no_token(caplog):
    runtime, driver, _ = loaded(drops=True, chunks=True)
    expected = served(driver)
    drop(runtime, 30)
    living = []
    for slot, prompt in enumerate(PROMPTS[:4]):
        admit = SlotAdmit(slot, prompt, len(prompt), greedy(60), pages=pages(slot))
        driver.run(admits=(admit,), prefill=(PrefillRow(slot, 0, min(8, len(prompt))),))
        for start in range(8, len(prompt), 8):
            driver.run(prefill=(PrefillRow(slot, start, min(8, len(prompt) - start)),))
        living.append(slot)
    results = driver.run(decode=tuple(living), lease_steps=32)
    assert runtime.telemetry().wait_timeouts == 1
    assert runtime.telemetry().fallbacks == {}
    assert "samplers that are done" in caplog.text
    assert "SM " in caplog.text
    for slot in living:
        assert tokens_of(results, slot)[:20] == expected[slot][1:21]
    runtime.close()


def test_after_the_second_fault_graphs_take_over(caplog):
    runtime, driver, weights = loaded(drops=True)
    drop(runtime, 20)
    tokens = served(driver, n=60)
    telemetry = runtime.telemetry()
    assert telemetry.wait_timeouts == 2
    assert telemetry.fallbacks == {"wait_timeout": 1}
    assert not telemetry.resident
    assert "graphs backend takes over" in caplog.text
    for prompt, ours in zip(PROMPTS, tokens, strict=True):
        gaps, deviation = greedy_gaps(LLAMA, weights, list(prompt), ours, "cuda")
        assert len(ours) == 60
        assert gaps.max().item() < 0.1 * deviation
    runtime.close()


def test_a_stalled_host_leaves_no_spinning_kernel():
    """Nobody polls: the lease runs out, then the kernel leaves by itself."""
    runtime, driver, _ = loaded()
    driver.start(0, PROMPTS[2], greedy(500), pages=pages(0))
    runtime.submit(StepPlan(driver.plan_id + 1, decode=(0,), lease_steps=32))
    session = runtime._session
    end = time.monotonic() + 5
    while session.resident and time.monotonic() < end:
        time.sleep(0.05)
    assert not session.resident
    driver.plan_id += 1
    assert len(driver.finish()) == 32
    runtime.close()


def test_models_the_kernel_has_no_variant_for_are_told(tmp_path):
    from megakernel_runtime.resident.layout import why_not

    assert "head_dim is 32" in (why_not(replace(LLAMA, head_dim=32)) or "")
    assert "12 query heads" in (why_not(replace(LLAMA, n_heads=12, n_kv_heads=1)) or "")
    assert why_not(LLAMA) is None


def test_sampled_and_greedy_slots_in_one_batch():
    """Slots that draw take part as the reference says, and give the same tokens for the same seed."""
    runtime, driver, _ = loaded()
    menu = [greedy(30), SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=30)]
    told = []
    for _ in range(2):
        firsts = [driver.start(s, PROMPTS[2], params, pages=pages(s)).token for s, params in enumerate(menu)]
        results = driver.run(decode=(0, 1), lease_steps=32)
        told.append([firsts, tokens_of(results, 0), tokens_of(results, 1)])
        driver.run(releases=(0, 1))
    assert told[0] == told[1]
    torch.cuda.synchronize()
    runtime.close()
