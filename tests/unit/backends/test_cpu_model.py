"""The CPU backend's whole operations against the reference interpreter, in every format and in mixed steps."""

import pytest
import torch

from megakernel_runtime.backends.cpu.batch import BatchMaker
from megakernel_runtime.backends.cpu.model import CpuModel
from megakernel_runtime.program.slots import SlotTable
from megakernel_runtime.weights.random_weights import random_weights
from tests.program.programs import (
    CASES,
    N_PAGES,
    PAGE,
    admit,
    decode,
    ignore_progress,
    interpreter,
    ours,
    prefill,
    relative_error,
)


@pytest.fixture(scope="module", params=CASES)
def case(request, tiny_model, tmp_path_factory):
    family, changes = CASES[request.param]
    return ours(tiny_model(family, seed=7, **changes), tmp_path_factory.mktemp(request.param))


class Machine:
    """A CPU model with slots, driven like the interpreter."""

    def __init__(self, config, weights, weight_format, max_slots=8):
        self.slots = SlotTable(max_slots, PAGE, N_PAGES, PAGE * N_PAGES)
        self.model = CpuModel(config, weights, weight_format, N_PAGES, PAGE, ignore_progress)
        self.batches = BatchMaker(max_slots, N_PAGES, PAGE, config.sliding_window, self.model.cache.data.dtype)

    def step(self, segments, tokens):
        """Logits by slot; slots advance by `tokens` (by slot)."""
        batch = self.batches.make(segments)
        with torch.inference_mode():
            logits = self.model(batch)
        sampled = [s.slot.index for s in batch.segments if s.samples]
        by_slot = dict(zip(sampled, logits.clone(), strict=True))
        for s in batch.segments:
            self.slots.advance(s, tokens[s.slot.index] if s.samples else None)
        return by_slot


def mixed_steps(config, weights, weight_format, dtype, prompts):
    """Run the same mixed schedule on both; return the logits of all that sampled, ours and the reference's.

    Contexts differ enough for several attention groups; slots join while others decode; chunks are uneven.
    """
    machine = Machine(config, weights, weight_format)
    reference, slots = interpreter(config, weights, dtype=dtype)
    order = torch.randperm(N_PAGES, generator=torch.Generator().manual_seed(5)).tolist()
    share = N_PAGES // len(prompts)
    done = [0] * len(prompts)
    ours_, theirs = [], []
    for index, prompt in enumerate(prompts):
        for table in (machine.slots, slots):
            admit(table, index, prompt, order[index * share : (index + 1) * share])
    for step in range(24):
        parts = []
        for index, prompt in enumerate(prompts):
            if step < index:
                continue
            if done[index] < len(prompt):
                count = min((5, 1, 64, 3)[(step + index) % 4], len(prompt) - done[index])
                parts.append((prefill, index, done[index], count))
                done[index] += count
            else:
                parts.append((decode, index))
        reference.step([make(slots, *rest) for make, *rest in parts])
        sampled = [rest[0] for make, *rest in parts if make is decode or done[rest[0]] == len(prompts[rest[0]])]
        tokens = {index: decode(slots, index).slot.tokens[-1] for index in sampled}
        by_slot = machine.step([make(machine.slots, *rest) for make, *rest in parts], tokens)
        assert set(by_slot) == set(sampled)
        ours_ += [by_slot[index] for index in sampled]
        theirs += list(reference.logits)
    return torch.stack(ours_), torch.stack(theirs)


def prompts_for(config):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, config.vocab_size, (n,), generator=generator).tolist() for n in (3, 190, 7, 40)]


def test_fp32_equals_the_reference_in_mixed_steps(case):
    config, weights = case
    ours_, theirs = mixed_steps(config, weights, "fp32", torch.float32, prompts_for(config))
    assert len(ours_) > 50
    assert relative_error(ours_, theirs) < 1e-5


@pytest.mark.parametrize(("weight_format", "bound"), [("fp16", 2e-3), ("bf16", 4e-2), ("int8", 8e-2)])
def test_other_formats_are_as_close_as_their_rounding(case, weight_format, bound):
    config, weights = case
    ours_, theirs = mixed_steps(config, weights, weight_format, torch.float32, prompts_for(config)[:2])
    assert 1e-6 < relative_error(ours_, theirs) < bound


@pytest.fixture(scope="module")
def wide(tiny_model, tmp_path_factory):
    """A model whose matrices fit the kernels of int8 and int4."""
    return ours(tiny_model("llama", seed=9, vocab_size=160), tmp_path_factory.mktemp("wide"))


def test_int4_is_close_to_what_four_bits_can_be(wide):
    config, weights = wide
    ours_, theirs = mixed_steps(config, weights, "int4", torch.float32, prompts_for(config)[:2])
    assert 1e-2 < relative_error(ours_, theirs) < 0.5


def test_logits_are_f32_in_every_format(wide):
    config, _ = wide
    weights = random_weights(config, 1)
    for weight_format in ("fp32", "fp16", "bf16", "int8", "int4"):
        machine = Machine(config, weights, weight_format)
        admit(machine.slots, 0, range(6), range(4))
        (logits,) = machine.step([prefill(machine.slots, 0, 0, 6)], {0: 1}).values()
        assert logits.dtype is torch.float32
        assert not torch.equal(logits, logits.bfloat16().float())  # not rounded on the way


def test_weight_bytes_follow_the_format(wide):
    config, weights = wide
    sizes = {f: Machine(config, weights, f).model.weight_bytes for f in ("fp32", "fp16", "bf16", "int8", "int4")}
    matrices = sum(w.numel() for name, w in weights.items() if w.dim() == 2 and name != "embed")
    assert sizes["fp32"] == 4 * matrices
    assert sizes["fp16"] == sizes["bf16"] == 2 * matrices
    assert sizes["fp32"] > sizes["fp16"] > sizes["int8"] > sizes["int4"]


def test_a_cache_takes_memory_only_where_it_is_written(wide):
    import psutil

    config, weights = wide
    process = psutil.Process()
    before = process.memory_info().rss
    model = CpuModel(config, weights, "fp32", 100_000, 16, ignore_progress)
    assert model.cache.data.nbytes > 200e6
    assert process.memory_info().rss - before < 50e6
    assert not model.cache.data[0, -10:].any()
