import os

import pytest

from megakernel_runtime.backends.cpu import sizes
from megakernel_runtime.backends.cpu.machine import available_bytes, share_cores, usable_threads
from megakernel_runtime.backends.cpu.sizes import choose_capacity
from megakernel_runtime.interface import CapacityError, RuntimeSpec
from megakernel_runtime.models.config import ModelConfig

CONFIG = ModelConfig("llama", 1000, 64, 2, 4, 2, 16, 128, 1e-5, 1e4, max_position=2048)
TOKEN_BYTES = 2 * 2 * 32 * 4  # layers, keys and values, KV width, f32


def spec(**kw):
    return RuntimeSpec("cpu", "", **kw)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("250000 100000", 2), ("", None)],
)
def test_threads_obey_the_quota(tmp_path, quota, expected):
    allowed = len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_threads(tmp_path) == (allowed if expected is None else min(allowed, expected))


def test_threads_without_control_groups(tmp_path):
    assert usable_threads(tmp_path / "none") == len(os.sched_getaffinity(0))


def test_available_memory(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemAvailable:    64 kB\n")
    assert available_bytes(meminfo, tmp_path) == 64 * 1024
    (tmp_path / "memory.max").write_text("max")
    (tmp_path / "memory.current").write_text("1000")
    assert available_bytes(meminfo, tmp_path) == 64 * 1024
    (tmp_path / "memory.max").write_text("31000")
    assert available_bytes(meminfo, tmp_path) == 30000
    assert available_bytes(tmp_path / "none", tmp_path) is None
    meminfo.write_text("nothing: 0")
    assert available_bytes(meminfo, tmp_path) is None


def test_waiting_threads_sleep_unless_the_user_decided(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    share_cores()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    share_cores()
    assert int(os.environ["GOMP_SPINCOUNT"]) < 100_000
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    share_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "5"


def test_sizes_that_were_asked_for():
    c = choose_capacity(
        spec(max_slots=3, max_model_len_tokens=100, max_step_tokens=7, page_size_tokens=8, n_pages=20), CONFIG, "fp32"
    )
    assert (c.max_slots, c.max_model_len_tokens, c.max_step_tokens) == (3, 100, 7)
    assert (c.page_size_tokens, c.n_pages, c.vocab_size) == (8, 20, 1000)


def test_sizes_that_were_not():
    c = choose_capacity(spec(), CONFIG, "fp32")
    assert c.max_model_len_tokens == 2048
    assert c.n_pages * 16 == 2048 * c.max_slots  # no more than all slots can fill
    assert c.max_step_tokens >= c.max_slots


def test_a_step_has_room_for_every_slot():
    assert choose_capacity(spec(max_slots=300), CONFIG, "fp32").max_step_tokens == 300


def test_memory_bounds_the_cache_and_the_context():
    c = choose_capacity(spec(kv_memory_bytes=TOKEN_BYTES * 1000), CONFIG, "fp32")
    assert c.n_pages == 62
    assert c.max_model_len_tokens == 992
    assert choose_capacity(spec(kv_memory_bytes=TOKEN_BYTES * 1000), CONFIG, "bf16").n_pages == 125


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"max_model_len_tokens": 4096}, r"max_model_len is 4096 tokens, but the model knows 2048"),
        ({"max_model_len_tokens": 100, "n_pages": 2}, r"needs 51200 bytes of KV memory, but there are 16384"),
        ({"kv_memory_bytes": 1}, "raise kv_memory or pages, or lower max_model_len"),
    ],
)
def test_sizes_that_cannot_be(asked, says):
    with pytest.raises(CapacityError, match=says):
        choose_capacity(spec(**asked), CONFIG, "fp32")


def test_a_model_too_large_for_the_machine(monkeypatch):
    monkeypatch.setattr(sizes, "available_bytes", lambda: 10_000_000)
    with pytest.raises(CapacityError, match=r"but 10000000 are available; choose a smaller weight_format"):
        choose_capacity(spec(), CONFIG, "fp32")
    monkeypatch.setattr(sizes, "available_bytes", lambda: None)
    choose_capacity(spec(), CONFIG, "fp32")
