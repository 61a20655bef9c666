"""The reference interpreter against Hugging Face in fp32, and against itself in other schedules."""

import pytest
import torch

from megakernel_runtime.program.reference.attention import attend, combine
from megakernel_runtime.program.reference.kv_cache import PagedKv
from tests.program.programs import (
    CASES,
    N_PAGES,
    PAGE,
    admit,
    all_logits,
    decode,
    interpreter,
    ours,
    prefill,
    relative_error,
)


@pytest.fixture(scope="module", params=CASES)
def case(request, tiny_model, tmp_path_factory):
    family, changes = CASES[request.param]
    model = tiny_model(family, seed=sum(map(ord, request.param)), **changes)
    config, weights = ours(model, tmp_path_factory.mktemp(request.param))
    ids = torch.randint(0, config.vocab_size, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    return config, weights, ids, theirs


def test_logits_equal_hugging_face_in_fp32(case):
    config, weights, ids, theirs = case
    assert relative_error(all_logits(config, weights, ids, span_tokens=8), theirs) < 1e-4
    assert theirs.std() > 0.1  # not a comparison of nothing with nothing


def test_bf16_is_close_and_not_the_same(case):
    config, weights, ids, theirs = case
    machine, slots = interpreter(config, weights, dtype=torch.bfloat16)
    admit(slots, 0, ids, range(10))
    machine.step([prefill(slots, 0, 0, len(ids))])
    error = relative_error(machine.logits, theirs[-1:])
    assert 1e-4 < error < 0.05


def test_chunks_and_decode_rows_in_one_step_equal_whole_sequences(case):
    config, weights, ids, theirs = case
    machine, slots = interpreter(config, weights, span_tokens=8, n_pages=64)
    pages = torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist()
    other = ids[::-1]
    # Slot 0 decodes (forced to follow `ids`) while slot 1 prefills `other` in chunks of 5 through scattered pages.
    admit(slots, 0, ids[:3], pages[:10])
    admit(slots, 1, other, pages[10:20])
    machine.step([prefill(slots, 0, 0, 3)])
    seen = [machine.logits[0]]
    for start in range(0, 35, 5):
        n = machine.logits.shape[0]
        assert n == 1
        slot_0 = decode(slots, 0)
        slot_0.slot.tokens[-1] = ids[slot_0.start]
        machine.step([prefill(slots, 1, start, 5), slot_0] if start % 2 else [slot_0, prefill(slots, 1, start, 5)])
        seen.append(machine.logits[-1])
    assert relative_error(torch.stack(seen), theirs[2 : 2 + len(seen)]) < 1e-4
    machine.step([prefill(slots, 1, 35, 2)])
    (alone,) = all_logits(config, weights, other)[-1:]
    assert relative_error(machine.logits, alone.unsqueeze(0)) < 1e-5


def test_rows_that_do_not_sample_give_no_logits(tiny_model, tmp_path):
    config, weights = ours(tiny_model("llama"), tmp_path)
    machine, slots = interpreter(config, weights)
    admit(slots, 0, range(8), range(2))
    assert machine.step([prefill(slots, 0, 0, 5)]) == []
    assert machine.logits.shape == (0, config.vocab_size)
    (choice,) = machine.step([prefill(slots, 0, 5, 3)])
    assert choice.token == machine.logits[0].argmax()


def test_greedy_decode_equals_generate(tiny_model, tmp_path):
    model = tiny_model("qwen3", seed=5)
    config, weights = ours(model, tmp_path)
    machine, slots = interpreter(config, weights)
    prompt = [5, 9, 77, 3]
    with torch.inference_mode():
        theirs = model.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    admit(slots, 0, prompt, range(20))
    machine.step([prefill(slots, 0, 0, 4)])
    for _ in range(39):
        machine.step([decode(slots, 0)])
    assert decode(slots, 0).slot.tokens == theirs[0].tolist()


@pytest.mark.parametrize("span", [1, 3, 16, 100])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_attention_does_not_depend_on_the_spans(span, window):
    generator = torch.Generator().manual_seed(0)
    n, rows = 21, 4
    q = torch.randn(rows, 6, 8, generator=generator)
    k, v = torch.randn(2, n, 2, 8, generator=generator) * 3
    positions = torch.arange(n - rows, n)
    partials = [attend(q, k[i : i + span], v[i : i + span], positions, i, window) for i in range(0, n, span)]
    result = torch.stack([combine(torch.stack(of_row)) for of_row in zip(*partials, strict=True)])
    for row, position in enumerate(positions.tolist()):
        first = 0 if window is None else position - window + 1
        keys, values = (x[first : position + 1].repeat_interleave(3, dim=1).double() for x in (k, v))
        weights = (torch.einsum("hd,shd->hs", q[row].double(), keys) / 8**0.5).softmax(-1)
        torch.testing.assert_close(
            result[row].double(), torch.einsum("hs,shd->hd", weights, values), rtol=1e-5, atol=1e-5
        )


def test_pages_hold_what_was_written_and_nothing_else_is_touched(tiny_model, tmp_path):
    config, _ = ours(tiny_model("llama"), tmp_path)
    kv = PagedKv(config, N_PAGES, PAGE, torch.float32)
    k, v = torch.randn(2, 9, config.n_kv_heads, config.head_dim)
    kv.write(1, [7, 3, 250], 0, k[:6], v[:6])
    kv.write(1, [7, 3, 250], 6, k[6:], v[6:])
    got_k, got_v = kv.read(1, [7, 3, 250, 11], 9)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    untouched = [p for p in range(N_PAGES) if p not in (7, 3, 250)]
    assert not kv.data[1, untouched].any()
    assert not kv.data[0].any()
