"""The decode benchmark's arithmetic, and its driver on a runtime that needs no GPU."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megakernel_runtime.interface import Capacity
from tests.unit.backends.graphs.scenes import TINY

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def importable():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def driver():
    from decode_driver import Driver, device_weights, load

    capacity = Capacity(2, 16, 32, 256, 64, 32, 2, TINY.vocab_size)
    runtime = load("host", TINY, device_weights(TINY, "cpu"), capacity)
    yield Driver(runtime, 8)
    runtime.close()


def test_the_driver_measures_steps_of_the_batch(driver):
    from decode_driver import Samples

    samples = Samples()
    for _ in range(2):
        driver.decode(samples, "greedy", 2, 40, 2)
    assert len(samples.rounds) == len(samples.idle) == 2
    assert len(samples.periods) >= 2 * 7
    assert min(samples.periods) > 0
    assert samples.steps >= len(samples.periods)
    assert all(0 <= share <= 1 for share in samples.idle)
    assert samples.states["compute_ns"] > 0


def test_the_driver_times_prompts_of_several_chunks(driver):
    assert driver.prompt(150, 2) > 0
    assert driver.runtime.telemetry().steps


def test_bytes_of_a_step():
    from decode import step_bytes

    config = replace(TINY, tied_embeddings=True)
    weights = sum(torch.Size(shape).numel() for shape in config.weight_shapes().values())
    kv = config.n_layers * 2 * config.kv_size
    assert step_bytes(config, 1, 100) == 2 * (weights + 100 * kv)
    assert step_bytes(config, 8, 100) == 2 * (weights + 800 * kv)
    assert step_bytes(replace(config, sliding_window=10), 8, 100) == 2 * (weights + 80 * kv)
    untied = replace(config, tied_embeddings=False)
    assert step_bytes(untied, 1, 100) == step_bytes(config, 1, 100), "the head is read, the embedding is not"


def test_intervals_hold_the_median_and_are_the_same_each_time():
    from decode import interval

    rounds = [10.0, 11.0, 12.0, 13.0, 50.0]
    low, high = interval(rounds)
    assert (low, high) == interval(rounds)
    assert 10.0 <= low <= 12.0 <= high <= 50.0
    assert interval([3.0] * 4) == (3.0, 3.0)


def rows():
    from decode import row_of
    from decode_driver import Samples

    def one(backend, batch, us, baseline):
        states = {"compute_ns": 3e6, "wait_dependency_ns": 1e6}
        samples = Samples([us] * 9, [us] * 3, [0.25], states, launches_avoided=900, steps=9)
        return row_of(samples, backend, batch, 128, 500.0, baseline)

    return [
        one("megakernel", 1, 800.0, 1000.0),
        one("graphs", 1, 1000.0, 1000.0),
        one("megakernel", 8, 2000.0, 1600.0),
        one("graphs", 8, 1600.0, 1600.0),
    ]


def test_rows_compare_with_the_baseline_and_the_floor():
    first, _, loss, _ = rows()
    assert first.ratio == pytest.approx(1.25)
    assert first.floor_share == pytest.approx(0.625)
    assert first.tokens_per_s == pytest.approx(1250)
    assert first.launches_avoided == pytest.approx(100)
    assert first.states == {"compute": 0.75, "wait_dependency": 0.25}
    assert loss.ratio == pytest.approx(0.8)


def test_losses_are_told(capsys):
    from decode import show

    show(rows(), [{"backend": "graphs", "tokens": 128, "ms": 2.0}], 4e12)
    told = capsys.readouterr().out
    assert "loses at batch 8, context 128: 0.80 times" in told
    assert "loses at batch 1" not in told
    assert "read ceiling 4000 GB/s" in told


def test_costs_take_the_best_backend_and_the_largest_batch_in_time():
    from decode import costs

    one, eight, gpus = costs(rows(), per_hour=3.6, users=100, target_ms=1.7)
    assert "0.8000 a million tokens (megakernel)" in one
    assert "0.2000 a million tokens (graphs)" in eight
    assert "100 users" in gpus
    assert "13 GPUs, 8 users on each" in gpus
    assert "no measured batch keeps 0.5 ms" in costs(rows(), 3.6, 100, 0.5)[-1]


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from decode_plot import plot

    plot(rows(), "tiny", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_script_prints_a_table_and_json(monkeypatch, capsys):
    import decode

    monkeypatch.setitem(decode.SHAPES, "smollm2-135m", TINY)
    arguments = ["--backends", "host", "--model", "smollm2-135m", "--batches", "1", "2", "--contexts", "40"]
    arguments += ["--rounds", "2", "--lease-steps", "4", "--ceiling-bytes", "4096", "--prompts", "33"]
    arguments += ["--max-step-tokens", "64", "--gpu-hour-cost", "1"]
    monkeypatch.setattr(sys, "argv", ["decode.py", *arguments])
    decode.main()
    out = capsys.readouterr().out
    told = json.loads(out.splitlines()[-1])
    assert [(row["backend"], row["batch"]) for row in told["rows"]] == [("host", 1), ("host", 2)]
    assert told["prompts"][0]["tokens"] == 33
    assert "a million tokens (host)" in out
