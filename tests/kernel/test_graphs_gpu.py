"""The graphs backend on a GPU: kernels against their twins, models against the reference, captured against uncaptured.

`pytest tests/kernel/test_graphs_gpu.py` takes a few minutes, most of it compiling; it needs Triton and no network (the
real model's test is skipped where its file is not at hand).
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from megakernel_runtime.backends.graphs.load import FORMATS, cuda_device, make_runtime
from megakernel_runtime.factory import load_runtime
from megakernel_runtime.interface import Capacity, PrefillRow, RuntimeSpec, SamplingParams, SlotAdmit
from megakernel_runtime.weights.random_weights import random_weights
from tests.program import programs
from tests.program.programs import CASES, ignore_progress, ours, relative_error
from tests.unit.backends.contract import Contract, Driver, greedy, pages_of, tokens_of
from tests.unit.backends.graphs.machine import N_PAGES, PAGE, Machine, logits_of
from tests.unit.backends.graphs.scenes import TINY, drawn, make_scene, plain_menu, sampling_menu
from tests.unit.backends.test_contract import SIZES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

HAS_TRITON = importlib.util.find_spec("triton") is not None
CRITICAL_31 = 61.10  # upper 0.1 % point of the chi-square distribution with 31 degrees of freedom
SHAPED = replace(
    TINY,
    vocab_size=1000,
    hidden_size=512,
    n_layers=3,
    n_heads=8,
    n_kv_heads=2,
    head_dim=64,
    ffn_size=1408,
    max_position=8192,
)
HEADS = {
    "64": SHAPED,
    "96-window": replace(SHAPED, head_dim=96, n_heads=6, sliding_window=300),
    "128-qk-norm": replace(SHAPED, head_dim=128, n_heads=4, n_kv_heads=4, qk_norm=True),
}


# ---------------------------------------------------------------- operations


def names_of_comparisons():
    if not HAS_TRITON:
        return []
    from tests.unit.backends.graphs.comparisons import comparisons

    return list(comparisons("cpu", torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", names_of_comparisons())
def test_kernel_equals_its_twin(name, dtype):
    from tests.unit.backends.graphs.comparisons import comparisons

    compare = comparisons("cuda", dtype)[name]
    assert compare() is None


@pytest.mark.parametrize("menu", [plain_menu, sampling_menu])
@pytest.mark.parametrize("vocab", [49152, 128256, 151936])
def test_sampler_equals_the_reference_at_full_size(vocab, menu):
    """Same token for the same logits, but where the draw falls within rounding of a border between two tokens."""
    from megakernel_runtime.backends.graphs.device.ops import TritonOps
    from megakernel_runtime.backends.graphs.torch_ops import TorchOps

    full = menu is sampling_menu
    decoding = tuple((n, n - 1) for n in range(20, 36))
    kw = {"decoding": decoding, "chunks": (), "full": full, "sampling": menu}
    config = replace(TINY, vocab_size=vocab)
    scenes = [make_scene(config, "cuda", **kw) for _ in range(2)]
    all_ops = (TritonOps(scenes[0].tables, 132), TorchOps(scenes[1].tables))
    same = total = 0
    for step in range(6):
        logits = drawn((16, vocab), step, "cuda", scale=1.0 + step)
        results = []
        for scene, ops in zip(scenes, all_ops, strict=True):
            ops.embed(scene.shape, torch.zeros(vocab, config.hidden_size, device="cuda"))
            ops.sample(scene.shape, logits.clone())
            results.append(scene.tables.result[:16, :2].cpu())
        live = (results[0][:, 1] != 0) & (results[1][:, 1] != 0)
        total += int(live.sum())
        same += int((results[0][live, 0] == results[1][live, 0]).sum())
        scenes[0].tables.state.arena.copy_(scenes[1].tables.state.arena)  # a difference is counted once
        if full:
            ours_, theirs = (scene.tables for scene in scenes)
            for o in (o for o in range(16) if live[o] and sampling_menu(o).top_logprobs):
                n = sampling_menu(o).top_logprobs
                assert torch.equal(ours_.top_ids[o, :n], theirs.top_ids[o, :n])
                assert torch.allclose(ours_.top_logprobs[o, :n], theirs.top_logprobs[o, :n], atol=1e-3)
    assert total > 40
    assert same >= total - 1, f"{same} of {total}"


@pytest.mark.parametrize("cuts", [{}, {"top_k": 31}, {"top_p": 0.9999999}, {"min_p": 1e-6}])
def test_draws_follow_the_distribution(cuts):
    """Chi-square over 102,400 draws of 16 streams."""
    from megakernel_runtime.backends.graphs.device.ops import TritonOps

    config = replace(TINY, vocab_size=32)
    decoding = tuple((n, n - 1) for n in range(20, 36))

    def sampling(index):
        return SamplingParams(temperature=0.8, seed=index * 7919, max_tokens=1_000_000, **cuts)

    scene = make_scene(config, "cuda", decoding=decoding, chunks=(), sampling=sampling)
    scene.tables.state.fields[:, 4] = 2**30  # LIMIT: no context ends these sequences
    ops = TritonOps(scene.tables, 132)
    ops.embed(scene.shape, torch.zeros(32, config.hidden_size, device="cuda"))
    row = torch.linspace(-1.5, 1.5, 32, device="cuda")
    seen = torch.zeros(32, dtype=torch.long, device="cuda")
    for _ in range(6400):
        ops.sample(scene.shape, row.repeat(16, 1))
        seen += torch.bincount(scene.tables.result[:16, 0], minlength=32)
    weights = (row.double() / 0.8).exp()
    if "top_k" in cuts:
        weights[0] = 0.0
        assert seen[0] == 0
    expected = weights / weights.sum() * seen.sum()
    used = expected > 0
    statistic = ((seen - expected) ** 2 / expected)[used].sum().item()
    assert seen.sum() == 102_400
    assert statistic < CRITICAL_31


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference_in_f32(tiny_model, tmp_path, case):
    family, changes = CASES[case]
    config, weights = ours(tiny_model(family, **changes), tmp_path)
    machine = Machine(config, weights, device="cuda")
    reference, slots = programs.interpreter(config, weights, max_slots=4, page=PAGE, n_pages=N_PAGES)

    def theirs(segments):
        return reference.logits if reference.step(segments) else None

    expected, got = logits_of(theirs, slots), logits_of(machine.step, machine.slots)
    assert len(expected) == len(got) == 6
    assert max(relative_error(a, b) for a, b in zip(got, expected, strict=True)) < 1e-4
    assert [s.tokens for s in machine.slots._slots] == [s.tokens for s in slots._slots]


def long_prompt_logits(machine, slots, page, length):
    """Logits after a prompt in three chunks, and of two decode steps behind it."""
    tokens = torch.randint(1000, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    programs.admit(slots, 0, tokens, reversed(range(-(-(length + 8) // page))))
    third = length // 3
    machine([programs.prefill(slots, 0, 0, third)])
    machine([programs.prefill(slots, 0, third, third)])
    logits = [machine([programs.prefill(slots, 0, 2 * third, length - 2 * third)])]
    return torch.cat(logits + [machine([programs.decode(slots, 0)]) for _ in range(2)])


@pytest.mark.parametrize("heads", HEADS)
def test_bf16_is_as_near_to_f32_as_rounding_allows(heads):
    """The yardstick is the reference itself in bf16: same operands, exact sums."""
    config, page, length = HEADS[heads], 32, 1500
    weights = random_weights(config, 0)

    def reference(dtype):
        machine, slots = programs.interpreter(config, weights, max_slots=4, page=page, n_pages=64, dtype=dtype)

        def step(segments):
            machine.step(segments)
            return machine.logits

        return long_prompt_logits(step, slots, page, length)

    machine = Machine(config, weights, torch.bfloat16, "cuda", page=page, n_pages=64, max_len=2048)
    got = long_prompt_logits(machine.step, machine.slots, page, length)
    exact, rounded = reference(torch.float32), reference(torch.bfloat16)
    assert relative_error(got, exact) < 2.0 * relative_error(rounded, exact) + 1e-3


# ---------------------------------------------------------------- the runtime


@pytest.fixture(scope="module")
def tiny_path(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("qwen3", seed=3, num_hidden_layers=2).save_pretrained(path)
    return path


class TestGraphs(Contract):
    @pytest.fixture
    def driver(self, tiny_path):
        spec = replace(SIZES, backend="graphs", model_path=str(tiny_path), weight_format="fp32")
        runtime = load_runtime(spec, ignore_progress)
        yield Driver(runtime)
        runtime.close()


class TestEager(Contract):
    @pytest.fixture
    def driver(self, tiny_path):
        spec = replace(SIZES, backend="eager", model_path=str(tiny_path), weight_format="fp32")
        runtime = load_runtime(spec, ignore_progress)
        yield Driver(runtime)
        runtime.close()


def shaped_runtime(config=SHAPED, *, captures=True, dtype="bf16", max_slots=8):
    capacity = Capacity(max_slots, 2048, 32, 4096, 1024, 32, 2, config.vocab_size)
    weights = random_weights(config, 0)
    return make_runtime(
        cuda_device("graphs"), config, weights, capacity, FORMATS[dtype], ignore_progress, captures=captures
    )


def generated(driver, n, sampling, slots=(0, 1, 2)):
    """Admit prompts of different lengths in one plan, decode them in long leases; return all tokens by slot."""
    prompts = {slot: tuple((slot * 37 + i * 11) % 1000 for i in range(30 + 300 * slot)) for slot in slots}
    admits = tuple(
        SlotAdmit(s, p, len(p), sampling(s, n), pages=tuple(range(s * 64, s * 64 + 64))) for s, p in prompts.items()
    )
    results = driver.run(admits=admits, prefill=tuple(PrefillRow(s, 0, len(p)) for s, p in prompts.items()))
    while any(len(tokens_of(results, s)) < n for s in slots):
        running = tuple(s for s in slots if len(tokens_of(results, s)) < n)
        results += driver.run(decode=running, lease_steps=32)
    driver.run(releases=tuple(slots))
    return {s: tokens_of(results, s) for s in slots}


def greedy_or_drawn(slot, n):
    if slot % 2 == 0:
        return greedy(n)
    return SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=slot, max_tokens=n)


def test_captured_and_uncaptured_steps_give_the_same_tokens():
    tokens = []
    for captures in (True, False):
        runtime = shaped_runtime(captures=captures, dtype="fp32")
        tokens.append(generated(Driver(runtime), 64, greedy_or_drawn))
        runtime.close()
    assert tokens[0] == tokens[1]


def test_the_same_tokens_run_to_run():
    runtime = shaped_runtime()
    driver = Driver(runtime)
    first = generated(driver, 48, greedy_or_drawn)
    assert all(generated(driver, 48, greedy_or_drawn) == first for _ in range(20))
    runtime.close()


def test_sampled_logprobs_equal_the_cpu_backends(tiny_path):
    spec = replace(SIZES, model_path=str(tiny_path), weight_format="fp32", threads=2)
    menu = [
        greedy(9, top_logprobs=5, frequency_penalty=0.6, presence_penalty=0.2, repetition_penalty=1.2),
        SamplingParams(temperature=0.8, top_p=0.9, seed=4, top_logprobs=20, logit_bias=((7, 3.0),), max_tokens=9),
        SamplingParams(temperature=1.2, allowed_token_ids=tuple(range(40)), seed=5, top_logprobs=0, max_tokens=9),
    ]
    told = []
    for backend in ("cpu", "graphs"):
        runtime = load_runtime(replace(spec, backend=backend), ignore_progress)
        driver = Driver(runtime)
        results = [driver.start(s, sampling=params) for s, params in enumerate(menu)]
        results += [t for r in driver.run(decode=(0, 1, 2), lease_steps=8) for t in r.tokens]
        told.append(sorted(results, key=lambda t: t.slot))
        runtime.close()
    assert len(told[0]) == len(told[1]) == 27
    for theirs, ours_ in zip(*told, strict=True):
        assert (ours_.slot, ours_.token, ours_.finish) == (theirs.slot, theirs.token, theirs.finish)
        assert ours_.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [v for _, v in ours_.top] == pytest.approx([v for _, v in theirs.top], abs=1e-3)


def test_the_gpu_does_not_wait_for_the_host():
    """While the batch is unchanged, steps stand in line: the time between them is next to nothing."""
    config = replace(SHAPED, hidden_size=2048, n_heads=32, n_kv_heads=8, ffn_size=8192, n_layers=8)
    runtime = shaped_runtime(config)
    driver = Driver(runtime)
    driver.start(0, tuple(range(100)), greedy(3000), pages=tuple(range(128)))
    driver.run(decode=(0,), lease_steps=32)
    before = runtime.telemetry()
    driver.submit(decode=(0,), lease_steps=32)
    results = []
    for _ in range(20):  # the next plan is there before the last one ends, as the scheduler has it
        while not any(r.plan_id == driver.plan_id and r.step_index >= 15 for r in results):
            results = driver.poll()
        driver.submit(decode=(0,), lease_steps=32)
    driver.finish()
    after = runtime.telemetry()
    waited, computed = after.wait_host_ns - before.wait_host_ns, after.compute_ns - before.compute_ns
    assert waited < 0.05 * computed, f"waited {waited / 1e6:.2f} ms, computed {computed / 1e6:.2f} ms"
    runtime.close()


def test_kernels_of_captured_steps_are_counted():
    runtime = shaped_runtime()
    driver = Driver(runtime)
    driver.start(0, tuple(range(40)), greedy(40), pages=tuple(range(64)))
    before = runtime.telemetry().launches
    driver.run(decode=(0,), lease_steps=4)
    after = runtime.telemetry().launches
    per_step = (after["decode-1", "step"] - before.get(("decode-1", "step"), 0)) / 4
    n_layers = SHAPED.n_layers
    assert 8 * n_layers <= per_step <= 16 * n_layers + 12, per_step
    assert after["mixed-64", "step"] > 0
    runtime.close()


def test_a_prompt_of_many_chunks_equals_one_of_few():
    runtime = shaped_runtime(dtype="fp32")
    driver = Driver(runtime)
    prompt = tuple((i * 7) % 1000 for i in range(1000))
    whole = driver.start(0, prompt, greedy(20), pages=tuple(range(40)))
    expected = [whole.token, *driver.decode(0, 5)]
    driver.run(
        admits=(SlotAdmit(1, prompt, 1000, greedy(20), pages=tuple(range(100, 140))),), prefill=(PrefillRow(1, 0, 1),)
    )
    start, last = 1, []
    for count in (63, 64, 65, 200, 607):
        last = driver.run(prefill=(PrefillRow(1, start, count),), decode=(0,))
        start += count
    assert [*tokens_of(last, 1), *driver.decode(1, 5)] == expected
    runtime.close()


def test_pages_may_lie_anywhere(tiny_path):
    spec = replace(SIZES, backend="graphs", model_path=str(tiny_path), weight_format="fp32")
    runtime = load_runtime(spec, ignore_progress)
    driver = Driver(runtime)
    told = []
    for pages in (pages_of(0), tuple(sorted(pages_of(0))), tuple(range(16))):
        told.append([driver.start(0, tuple(range(30)), greedy(30), pages=pages).token, *driver.decode(0, 20)])
        driver.run(releases=(0,))
    assert told[0] == told[1] == told[2]
    runtime.close()


def test_memory_comes_back(tiny_path):
    spec = replace(SIZES, backend="graphs", model_path=str(tiny_path))
    load_runtime(spec, ignore_progress).close()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        runtime = load_runtime(spec, ignore_progress)
        Driver(runtime).start(0)
        runtime.close()
        del runtime
    assert torch.cuda.memory_allocated() <= before + 2**20


PROMPTS_OF_WORDS = ("The capital of France is", "def fibonacci(n):", "Once upon a time")


def test_greedy_text_of_the_real_model_equals_the_cpu_backends(real_model_path):
    """In f32; where they part, the two best tokens must be next to equal."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model_path.parent, gguf_file=real_model_path.name)
    spec = RuntimeSpec("", str(real_model_path), max_slots=4, max_model_len_tokens=256, weight_format="fp32")
    told = []
    for backend in ("cpu", "graphs"):
        runtime = load_runtime(replace(spec, backend=backend), ignore_progress)
        driver = Driver(runtime)
        per_page = -(-256 // runtime.capacity.page_size_tokens)
        texts = []
        for s, words in enumerate(PROMPTS_OF_WORDS):
            pages = tuple(range(s * per_page, (s + 1) * per_page))
            first = driver.start(s, tokenizer(words)["input_ids"], greedy(64, top_logprobs=2), pages=pages)
            rest = [t for _ in range(63) for t in driver.run(decode=(s,))[-1].tokens]
            texts.append([first, *rest])
        told.append(texts)
        runtime.close()
    for theirs, ours_ in zip(*told, strict=True):
        for a, b in zip(theirs, ours_, strict=True):
            if a.token != b.token:
                assert a.top[0][1] - a.top[1][1] < 1e-2
                break
