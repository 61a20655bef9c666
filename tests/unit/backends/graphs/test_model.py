"""The bound program against the reference interpreter, on the host: all families, chunks and decode rows mixed."""

import pytest
import torch

from megakernel_runtime.backends.graphs.executor import Executor
from megakernel_runtime.backends.graphs.model import GraphsModel
from megakernel_runtime.backends.graphs.ops import make_tables
from megakernel_runtime.backends.graphs.readback import HostReadback
from megakernel_runtime.backends.graphs.shapes import Shape
from megakernel_runtime.backends.graphs.stepper import Stepper
from megakernel_runtime.backends.graphs.torch_ops import TorchOps
from megakernel_runtime.interface import Capacity
from megakernel_runtime.program.slots import SlotTable
from tests.program import programs
from tests.program.programs import CASES, ignore_progress, ours, relative_error

PAGE, N_PAGES, MAX_LEN = 4, 64, 96
PROMPTS = {0: (5, 6, 7, 8, 9, 10, 11), 1: (3,), 2: tuple(range(20, 50)), 3: (60, 61, 60, 61, 60)}


class WatchedOps(TorchOps):
    """Keeps the logits of the last step."""

    def logits(self, x, weight):
        self.seen = super().logits(x, weight)
        return self.seen.clone()


class Machine:
    """A stepper with slots of its own, stepped like the interpreter."""

    def __init__(self, config, weights, dtype=torch.float32, device="cpu"):
        capacity = Capacity(4, N_PAGES, PAGE, MAX_LEN, 64, 8, 2, config.vocab_size)
        with torch.inference_mode():
            tables = make_tables(config, capacity, torch.device(device), dtype)
            self.ops = WatchedOps(tables)
            self.model = GraphsModel(tables, self.ops, weights, ignore_progress)
        readback = HostReadback(tables.result, tables.top_ids, tables.top_logprobs)
        self.stepper = Stepper(tables, self.ops, Executor(self.model, {}), readback, None)
        self.slots = SlotTable(4, PAGE, N_PAGES, MAX_LEN)

    def step(self, segments):
        launch = self.stepper.launch(segments)
        result = launch.ticket.read(waited=False).result
        for segment in segments:
            token = int(result[launch.sampling.index(segment), 0]) if segment.samples else None
            self.slots.advance(segment, token)
        return self.ops.seen if launch.sampling else None


def schedule(slots):
    """Steps as lists of segments: chunks, single rows, mixed ones. Slots are advanced between."""
    for index, prompt in PROMPTS.items():
        pages = [index + 4 * i for i in reversed(range(16))]
        programs.admit(slots, index, prompt, pages)
    yield [programs.prefill(slots, 0, 0, 7), programs.prefill(slots, 1, 0, 1)]
    yield [programs.decode(slots, 1), programs.prefill(slots, 2, 0, 13), programs.decode(slots, 0)]
    yield [programs.prefill(slots, 2, 13, 1), programs.prefill(slots, 3, 0, 2)]
    yield [programs.prefill(slots, 3, 2, 3), programs.decode(slots, 0), programs.prefill(slots, 2, 14, 16)]
    for _ in range(3):
        yield [programs.decode(slots, index) for index in (3, 0, 2, 1)]


def logits_of(machine, slots):
    return [logits for segments in schedule(slots) if (logits := machine(segments)) is not None]


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
