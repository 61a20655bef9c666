from dataclasses import replace

import pytest

from megakernel_runtime.backends.graphs.sizes import Memory, choose_capacity
from megakernel_runtime.interface import CapacityError, RuntimeSpec
from tests.unit.backends.graphs.scenes import TINY

GIB = 1024**3
LLAMA_1B = replace(
    TINY,
    vocab_size=128256,
    hidden_size=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    max_position=131072,
    tied_embeddings=True,
)
TOKEN_BYTES = 16 * 2 * 512 * 2


def choose(free=140 * GIB, **spec):
    return choose_capacity(RuntimeSpec("graphs", "", **spec), LLAMA_1B, 2, Memory(free, "GPU"))


def test_what_is_left_becomes_kv_memory():
    c = choose()
    assert (c.max_slots, c.page_size_tokens, c.max_step_tokens, c.max_model_len_tokens) == (128, 32, 2048, 131072)
    kv = c.n_pages * 32 * TOKEN_BYTES
    assert 0.85 * 0.9 * 140 * GIB < kv + 2.47e9 < 0.9 * 140 * GIB


def test_no_more_pages_than_sequences_can_fill():
    assert choose(max_model_len_tokens=100, max_slots=3).n_pages == 3 * 4


def test_little_memory_shortens_contexts_unless_they_were_asked_for():
    c = choose(free=6 * GIB, max_slots=8, max_step_tokens=64)
    assert 1024 < c.max_model_len_tokens == c.n_pages * 32 < 131072
    with pytest.raises(CapacityError, match="a context of 131072 tokens needs"):
        choose(free=6 * GIB, max_slots=8, max_step_tokens=64, max_model_len_tokens=131072)


@pytest.mark.parametrize(("spec", "says"), [
    ({"free": 2 * GIB}, "the model needs about 3308277760 bytes and 0 for its KV cache, but GPU has 2147483648"),
    ({"kv_memory_bytes": 200 * GIB}, "GPU has 150323855360 free"),
    ({"n_pages": 10_000_000}, "GPU has 150323855360 free"),
    ({"page_size_tokens": 24}, "page_size_tokens is 24; it must be a power of two"),
    ({"max_model_len_tokens": 131073}, "but the model knows 131072 positions"),
])  # fmt: skip
def test_what_cannot_be_is_told(spec, says):
    with pytest.raises(CapacityError, match=says):
        choose(**spec)


def test_a_step_has_room_for_every_slot():
    assert choose(max_slots=200, max_step_tokens=10).max_step_tokens == 200
