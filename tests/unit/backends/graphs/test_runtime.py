"""Steps ahead of their results, on the host with results that are held back; loading."""

import time
from dataclasses import replace

import pytest
import torch

from megakernel_runtime.backends.graphs import load as loading
from megakernel_runtime.backends.graphs.load import host_device, load_on
from megakernel_runtime.factory import load_runtime
from megakernel_runtime.interface import (
    CapacityError,
    FinishReason,
    PageGrant,
    PrefillRow,
    RuntimeFault,
    RuntimeSpec,
    SlotAdmit,
)
from tests.program.programs import ignore_progress
from tests.unit.backends.contract import PROMPT, Driver, greedy, pages_of, tokens_of
from tests.unit.backends.test_contract import SIZES


@pytest.fixture(scope="module")
def tiny_path(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", seed=3).save_pretrained(path)
    return path


@pytest.fixture
def spec(tiny_path):
    return replace(SIZES, backend="eager", model_path=str(tiny_path), weight_format="fp32")


class Held:
    """A readback whose steps are not done before the test says so."""

    def __init__(self, inner):
        self.inner = inner
        self.n_done = 0
        self.n_started = 0

    def start(self):
        self.inner.start()

    def finish(self, n_outs, *, full):
        self.n_started += 1
        return HeldTicket(self, self.n_started, self.inner.finish(n_outs, full=full))


class HeldTicket:
    def __init__(self, held, number, inner):
        self.held, self.number, self.inner = held, number, inner

    def is_done(self):
        return self.number <= self.held.n_done

    def read(self, *, waited):
        assert self.is_done()
        return self.inner.read(waited=waited)


@pytest.fixture
def driver(spec):
    runtime = load_on(host_device(), spec, ignore_progress)
    yield Driver(runtime)
    runtime.close()


@pytest.fixture
def held(driver):
    held = driver.runtime._stepper._readback = Held(driver.runtime._stepper._readback)
    return held


def generate(driver, n, slot=0, **sampling):
    """Tokens of a slot decoded one plan at a time, released after."""
    tokens = [driver.start(slot, sampling=greedy(n, **sampling)).token, *driver.decode(slot, n - 1)]
    driver.run(releases=(slot,))
    return tokens


def test_steps_are_launched_before_results_of_earlier_ones_are_there(driver, held):
    held.n_done = 1_000
    expected = generate(driver, 13)
    first = driver.start(0, sampling=greedy(20)).token
    held.n_done = before = held.n_started
    driver.runtime._step_ns = 1e5
    driver.submit(decode=(0,), lease_steps=12)
    assert driver.runtime.poll(0.0) == []
    ahead = held.n_started - before
    assert ahead == 3  # a quarter of the lease
    held.n_done += 1
    (result,) = driver.runtime.poll(0.0)
    assert (result.step_index, result.n_rows, result.last) == (0, 1, False)
    held.n_done = 1_000
    results = [result, *driver.finish()]
    assert [first, *tokens_of(results, 0)] == expected


def test_a_plan_submitted_meanwhile_ends_the_lease_behind_what_is_launched(driver, held):
    held.n_done = 1_000
    expected = generate(driver, 6)
    first = driver.start(0, sampling=greedy(20)).token
    held.n_done = held.n_started
    driver.submit(decode=(0,), lease_steps=8)
    assert driver.runtime.poll(0.0) == []
    driver.submit(decode=(0,))
    held.n_done = 1_000
    results = driver.finish()
    assert [(r.plan_id - results[0].plan_id, r.n_rows, r.last) for r in results] == [
        (0, 1, False),
        (0, 1, False),
        (0, 0, True),
        (1, 1, True),
    ]
    assert [first, *tokens_of(results, 0)] == expected[:4]


def test_rows_launched_behind_a_stop_token_are_skipped(driver, held):
    held.n_done = 1_000
    wishes, others = {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 6}
    tokens, other = generate(driver, 5, **wishes), generate(driver, 5, slot=1, **others)
    assert tokens[1] != tokens[0]
    driver.start(0, sampling=greedy(20, stop_token_ids=(tokens[1],), **wishes))
    driver.start(1, sampling=greedy(20, **others))
    held.n_done = held.n_started
    driver.submit(decode=(0, 1), lease_steps=4)
    assert driver.runtime.poll(0.0) == []
    assert held.n_started - held.n_done == 2  # the second while nobody knows that the first one stops slot 0
    held.n_done = 1_000
    results = driver.finish()
    assert [r.n_rows for r in results] == [2, 1, 1, 1]
    assert [(t.token, t.finish) for r in results for t in r.tokens if t.slot == 0] == [(tokens[1], FinishReason.STOP)]
    assert tokens_of(results, 1) == other[1:]
    assert sum(n for (_, kind), n in driver.runtime.telemetry().steps.items() if kind == "decode") == 4 + 4 + 4


def test_poll_waits_no_longer_than_it_is_told(driver, held):
    held.n_done = 1_000
    driver.start(0)
    held.n_done = held.n_started
    driver.submit(decode=(0,))
    began = time.monotonic()
    assert driver.runtime.poll(0.05) == []
    assert 0.05 <= time.monotonic() - began < 5.0
    held.n_done += 1
    assert len(driver.runtime.poll(0.0)) == 1


def test_a_slot_given_away_keeps_its_results_apart(driver, held):
    """Results of the old owner that are still to come are told of it, not of the new one."""
    held.n_done = 1_000
    old, new = generate(driver, 3), generate(driver, 1, slot=1)
    driver.start(0, sampling=greedy(20))
    driver.decode(0, 1)
    held.n_done = held.n_started
    driver.submit(decode=(0,))
    driver.submit(
        releases=(0,),
        admits=(SlotAdmit(0, PROMPT, len(PROMPT), greedy(1), pages=pages_of(0)),),
        prefill=(PrefillRow(0, 0, len(PROMPT)),),
    )
    assert driver.runtime.poll(0.0) == []
    held.n_done = 1_000
    first, second = driver.finish()
    assert first.tokens[0].token == old[2]
    assert (second.tokens[0].token, second.tokens[0].finish) == (new[0], FinishReason.LENGTH)


def test_parked_without_plans_waiting_for_the_host_with_them(driver, held):
    held.n_done = 1_000
    driver.start(0)
    a = driver.runtime.telemetry()
    held.n_done = held.n_started
    driver.submit(decode=(0,))
    b = driver.runtime.telemetry()
    assert b.parked_ns > a.parked_ns
    held.n_done = 1_000
    driver.finish()
    c = driver.runtime.telemetry()
    assert c.wait_host_ns > a.wait_host_ns
    assert c.compute_ns > a.compute_ns
    assert c.bytes_streamed > a.bytes_streamed


def test_bytes_streamed_are_weights_and_context(driver):
    driver.start(0)
    before = driver.runtime.telemetry().bytes_streamed
    driver.run(decode=(0,))
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head_dim, f32
    read = driver.runtime.telemetry().bytes_streamed - before
    assert read == driver.runtime.info.weight_bytes + 7 * token_bytes


def test_a_decode_step_like_the_last_sends_nothing(driver, monkeypatch):
    sent = []
    stepper = driver.runtime._stepper
    monkeypatch.setattr(stepper, "_sendable", lambda words: sent.append(len(words)) or words)
    driver.start(0, sampling=greedy(30), pages=pages_of(0)[:3])
    driver.run(decode=(0,), lease_steps=4)
    del sent[:]
    driver.run(decode=(0,), lease_steps=2)
    assert sent == []
    driver.run(grants=(PageGrant(0, pages_of(0)[3:4]),), decode=(0,))
    assert len(sent) == 1


def test_same_logprobs_as_the_cpu_backend(driver, tiny_path):
    cpu = Driver(
        load_runtime(
            replace(SIZES, backend="cpu", model_path=str(tiny_path), weight_format="fp32", threads=1), ignore_progress
        )
    )
    wishes = {"top_logprobs": 4, "frequency_penalty": 0.7, "logit_bias": ((9, 1.5),)}
    told = []
    for d in (driver, cpu):
        results = [d.start(0, sampling=greedy(9, **wishes))]
        results += [t for r in d.run(decode=(0,), lease_steps=8) for t in r.tokens]
        told.append(results)
    for ours, theirs in zip(*told, strict=True):
        assert (ours.token, ours.finish, [i for i, _ in ours.top]) == (
            theirs.token,
            theirs.finish,
            [i for i, _ in theirs.top],
        )
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [v for _, v in ours.top] == pytest.approx([v for _, v in theirs.top], abs=1e-4)


def test_what_torch_refuses_is_a_fault(driver, monkeypatch):
    def broken(shape):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(driver.runtime._stepper._executor, "run", broken)
    with pytest.raises(RuntimeFault, match="a step failed: out of memory"):
        driver.start(0)


def test_a_token_outside_the_vocabulary_is_a_fault(driver):
    with pytest.raises(RuntimeFault, match="slot 0 has token 131; there are 0 to 130"):
        driver.start(0, (1, 131))


def test_a_closed_runtime_does_nothing(spec):
    runtime = load_on(host_device(), spec, ignore_progress)
    runtime.close()
    for call in (lambda: runtime.poll(0.0), lambda: Driver(runtime).submit()):
        with pytest.raises(RuntimeFault, match="closed"):
            call()
    assert runtime.telemetry().compute_ns == 0


def test_names(driver):
    info = driver.runtime.info
    assert (info.backend, info.device, info.model) == ("eager", "host", "LlamaForCausalLM 0M")
    assert info.kv_bytes == 64 * 4 * 2 * 2 * 2 * 16 * 4


def test_random_weights_need_no_weights(tiny_path, spec, tmp_path):
    (tmp_path / "config.json").write_text((tiny_path / "config.json").read_text())
    spec = replace(spec, model_path=str(tmp_path), random_weights=True)
    tokens = [generate(Driver(load_on(host_device(), spec, ignore_progress)), 6) for _ in range(2)]
    assert tokens[0] == tokens[1]


def test_formats_of_other_backends_are_refused(spec):
    with pytest.raises(CapacityError, match="weight format 'int4' is not for GPUs; choose auto, bf16, fp32"):
        load_on(host_device(), replace(spec, weight_format="int4"), ignore_progress)


class FakeCuda:
    """torch.cuda of a machine with one GPU of some age."""

    def __init__(self, capability):
        self.capability = capability

    def is_available(self):
        return self.capability is not None

    def current_device(self):
        return 0

    def get_device_name(self, index):
        return "NVIDIA T4"

    def get_device_capability(self, index):
        return self.capability

    def get_device_properties(self, index):
        return type("Properties", (), {"multi_processor_count": 40})

    def mem_get_info(self, index):
        return 15, 16


@pytest.mark.parametrize("backend", ["graphs", "eager"])
@pytest.mark.parametrize(("capability", "says"), [
    (None, "needs a CUDA GPU that PyTorch sees, and there is none; choose cpu"),
    ((7, 5), "needs a GPU of compute capability 8.0 or more, and NVIDIA T4 has 7.5; choose cpu"),
])  # fmt: skip
def test_machines_without_a_fitting_gpu_are_told(monkeypatch, backend, capability, says):
    monkeypatch.setattr(torch, "cuda", FakeCuda(capability))
    with pytest.raises(CapacityError, match=f"backend '{backend}' {says}"):
        load_runtime(RuntimeSpec(backend, ""), ignore_progress)


def test_a_fitting_gpu_is_described(monkeypatch):
    monkeypatch.setattr(torch, "cuda", FakeCuda((9, 0)))
    device = loading.cuda_device("graphs")
    assert (device.name, device.n_sms, device.memory.free_bytes) == ("NVIDIA T4, 40 SMs", 40, 15)


@pytest.mark.parametrize(("capability", "expected"), [(None, "cpu"), ((7, 5), "cpu"), ((8, 6), "graphs")])
def test_auto_takes_the_gpu_where_it_fits(monkeypatch, tiny_path, capability, expected):
    monkeypatch.setattr(torch, "cuda", FakeCuda(capability))
    loaded = []
    monkeypatch.setattr(loading, "load_graphs", lambda spec, progress: loaded.append(spec.backend))
    monkeypatch.setattr(
        "megakernel_runtime.backends.cpu.runtime.load_cpu", lambda spec, progress: loaded.append(spec.backend)
    )
    load_runtime(RuntimeSpec("auto", str(tiny_path)), ignore_progress)
    assert loaded == [expected]


def test_memory_that_runs_out_while_loading_is_told(monkeypatch, spec):
    def full(*_args, **_kw):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(loading, "make_tables", full)
    with pytest.raises(CapacityError, match="host ran out of memory while loading: lower kv_memory_bytes, n_pages"):
        load_on(host_device(), spec, ignore_progress)


def test_progress_counts_up(spec):
    told = []
    load_on(host_device(), spec, lambda phase, done, total: told.append((phase, done, total)))
    assert list(dict.fromkeys(phase for phase, _, _ in told)) == ["weights", "pack"]
    assert told[-1][1] == told[-1][2]
