"""The bound program against the reference interpreter, on the host: all families, chunks and decode rows mixed."""

import pytest
import torch

from megakernel_runtime.backends.graphs.executor import Executor
from megakernel_runtime.backends.graphs.shapes import Shape
from tests.program import programs
from tests.program.programs import CASES, ours, relative_error
from tests.unit.backends.graphs.machine import N_PAGES, PAGE, Machine, logits_of, schedule


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_reference_in_f32(tiny_model, tmp_path, case):
    family, changes = CASES[case]
    config, weights = ours(tiny_model(family, **changes), tmp_path)
    machine = Machine(config, weights)
    reference, slots = programs.interpreter(config, weights, max_slots=4, page=PAGE, n_pages=N_PAGES)

    def theirs(segments):
        return reference.logits if reference.step(segments) else None

    expected, got = logits_of(theirs, slots), logits_of(machine.step, machine.slots)
    assert len(expected) == len(got) == 6
    assert max(relative_error(a, b) for a, b in zip(got, expected, strict=True)) < 1e-5
    assert [s.tokens for s in machine.slots._slots] == [s.tokens for s in slots._slots]


def test_bf16_stays_near_the_reference(tiny_model, tmp_path):
    config, weights = ours(tiny_model("qwen3"), tmp_path)
    exact, rounded = Machine(config, weights), Machine(config, weights, torch.bfloat16)
    segments = next(iter(schedule(exact.slots)))
    expected = exact.step(segments)
    assert relative_error(rounded.step(next(iter(schedule(rounded.slots)))), expected) < 3e-2


def test_a_step_that_samples_nothing_has_no_head(tiny_model, tmp_path):
    config, weights = ours(tiny_model("llama"), tmp_path)
    machine = Machine(config, weights)
    programs.admit(machine.slots, 0, range(20), range(16))
    assert machine.step([programs.prefill(machine.slots, 0, 0, 9)]) is None
    assert not hasattr(machine.ops, "seen")


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_are_what_a_step_reads(tiny_model, tmp_path, tied):
    config, weights = ours(tiny_model("qwen2", tie_word_embeddings=tied), tmp_path)
    read = sum(w.numel() for name, w in weights.items() if tied or name != "embed") * 4
    assert Machine(config, weights).model.weight_bytes == read


def test_a_padded_step_gives_the_same_logits(tiny_model, tmp_path):
    config, weights = ours(tiny_model("mistral", sliding_window=5), tmp_path)

    class Padding(Executor):
        def fit(self, needed):
            return Shape(needed.rows + 9, 4, needed.blocks and 6, 4, needed.full)

    plain, padded = Machine(config, weights), Machine(config, weights)
    padded.stepper._executor = Padding(padded.model, {})
    expected, got = logits_of(plain.step, plain.slots), logits_of(padded.step, padded.slots)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a[: len(b)], b, atol=1e-5)
    assert [s.tokens for s in padded.slots._slots] == [s.tokens for s in plain.slots._slots]
