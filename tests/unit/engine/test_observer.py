"""What the engine measures: names that the table of families has, values that add up, frames that stay small."""

from dataclasses import replace

import pytest

from megakernel_runtime.interface import SampledToken, StepResult, Telemetry
from server.engine import observer as module
from server.engine.observer import BUSY_INTERVAL_S, IDLE_INTERVAL_S, MAX_SAMPLES, Observer
from server.telemetry.families import FAMILIES, Feed, Kind
from server.telemetry.metrics import Metrics
from tests.unit.scheduling.life import Life, capacity

TELEMETRY = Telemetry(
    compute_ns=6_000_000_000, wait_dependency_ns=1_000_000_000, wait_memory_ns=1_000_000_000,
    wait_host_ns=1_000_000_000, parked_ns=1_000_000_000, launches={("T8", "idle"): 3}, steps={(8, "decode"): 5},
    wait_timeouts=2, fallbacks={"abort": 1}, resident=True, kernels_avoided=7, bytes_streamed=10**9,
    bandwidth_ceiling_bytes_per_s=4e9,
)  # fmt: skip


class Device:
    """Only telemetry is asked of it."""

    def __init__(self):
        self.now = Telemetry()

    def telemetry(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still until it is moved: clock[0], in seconds."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: int(now[0] * 1e9))
    return now


@pytest.fixture
def life():
    return Life(capacity())


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def observer(clock, device, life):
    return Observer(device, life.scheduler)


def step(n_tokens=2, n_rows=3, started_ns=0, ended_ns=4_000_000):
    return StepResult(1, 0, True, tuple(SampledToken(i, 7) for i in range(n_tokens)), n_rows, started_ns, ended_ns)


def test_every_name_is_in_the_table_and_every_engine_fed_name_of_the_table_is_sent(observer, device, clock):
    device.now = TELEMETRY
    clock[0] += 1
    observer.step(step())
    (frame,) = observer.take()
    kinds = {Kind.GAUGE: frame.gauges, Kind.COUNTER: frame.counters}
    for kind, sent in kinds.items():
        expected = {(f.name, len(f.labels)) for f in FAMILIES if f.feed is Feed.ENGINE and f.kind is kind}
        assert {(name.split("|")[0], name.count("|")) for name in sent} == expected
    histograms = {f.name for f in FAMILIES if f.feed is Feed.ENGINE and f.kind is Kind.HISTOGRAM}
    assert set(observer._samples()) == histograms
    Metrics("model").observe_engine(frame)


def test_the_windows_ratios(observer, device, clock):
    device.now = TELEMETRY
    clock[0] += 2
    (frame,) = observer.take()
    assert frame.gauges["megakernel_idle_ratio"] == pytest.approx(0.4)
    assert frame.gauges["megakernel_bandwidth_bytes_per_second"] == 5e8
    assert frame.gauges["megakernel_bandwidth_ceiling_ratio"] == 0.125
    assert frame.gauges["megakernel_resident"] == 1
    assert frame.counters["megakernel_gpu_seconds_total|compute"] == 6.0
    assert frame.counters["megakernel_steps_total|8|decode"] == 5
    device.now = replace(TELEMETRY, compute_ns=7_000_000_000)
    clock[0] += 1
    assert observer.take()[0].gauges["megakernel_idle_ratio"] == 0.0


def test_nothing_measured_is_no_division_by_zero(observer):
    (frame,) = observer.take()
    assert frame.gauges["megakernel_idle_ratio"] == frame.gauges["megakernel_bandwidth_bytes_per_second"] == 0


def test_steps_become_samples_and_each_sample_is_sent_once(observer):
    observer.step(step(n_tokens=2, n_rows=3))
    observer.step(step(n_tokens=0, n_rows=5, ended_ns=1_000_000))
    observer.step(step(n_tokens=0, n_rows=0))  # the end of a superseded plan: no step at all
    (frame,) = observer.take()
    assert frame.samples["megakernel_step_seconds"] == [0.004, 0.001]
    assert frame.samples["megakernel_token_latency_seconds"] == [0.004, 0.004]
    assert frame.samples["vllm:iteration_tokens_total"] == [3, 5]
    assert observer.take()[0].samples == {}


def test_many_samples_take_several_frames_and_none_is_lost(observer):
    for _ in range(2 * MAX_SAMPLES + 1):
        observer.step(step(n_tokens=1))
    frames = observer.take()
    lengths = [len(frame.samples["megakernel_step_seconds"]) for frame in frames]
    assert lengths == [MAX_SAMPLES, MAX_SAMPLES, 1]


def test_a_frame_is_due_regularly_and_early_when_full(observer, clock):
    assert observer.due_in(busy=True) == pytest.approx(BUSY_INTERVAL_S)
    assert observer.due_in(busy=False) == pytest.approx(IDLE_INTERVAL_S)
    clock[0] += 0.1
    assert observer.due_in(busy=True) == pytest.approx(BUSY_INTERVAL_S - 0.1)
    for _ in range(MAX_SAMPLES):
        observer.step(step())
    assert observer.due_in(busy=False) == 0


def test_the_gap_runs_from_the_devices_end_to_the_next_plan_while_there_is_work(observer, life, clock):
    from tests.unit.scheduling.test_scheduler import ask

    life.submit(ask("a", max_tokens=2))
    life.plan()
    observer.submitted()  # the first of all: the device had nothing to wait for
    life.runtime.advance()
    life.absorb()
    observer.absorbed(int(clock[0] * 1e9))
    clock[0] += 0.5
    life.plan()
    observer.submitted()
    life.runtime.advance()
    life.absorb()
    observer.absorbed(int(clock[0] * 1e9))  # all work is done: the device waits for users, not for the host
    clock[0] += 5
    life.submit(ask("b"))
    life.plan()
    observer.submitted()
    assert observer.take()[0].samples["megakernel_host_gap_seconds"] == [0.5]


def test_a_plan_ahead_of_need_leaves_no_gap(clock, device):
    from tests.unit.scheduling.test_scheduler import ask

    life = Life(capacity(max_plans_ahead=2))
    observer = Observer(device, life.scheduler)
    life.submit(ask("a", max_tokens=9))
    life.plan()
    assert life.scheduler.n_unfinished_plans == 2
    observer.submitted()
    assert observer.take()[0].samples["megakernel_host_gap_seconds"] == [0.0]
