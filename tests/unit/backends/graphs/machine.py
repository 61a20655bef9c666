"""A model with slots of its own, stepped like the reference interpreter, that shows its logits; and steps to compare on."""

from __future__ import annotations

import time

import torch

from megakernel_runtime.backends.graphs.executor import Executor
from megakernel_runtime.backends.graphs.model import GraphsModel
from megakernel_runtime.backends.graphs.ops import make_tables
from megakernel_runtime.backends.graphs.readback import HostReadback
from megakernel_runtime.backends.graphs.stepper import Stepper
from megakernel_runtime.backends.graphs.torch_ops import TorchOps
from megakernel_runtime.interface import Capacity
from megakernel_runtime.program.slots import SlotTable
from tests.program import programs
from tests.program.programs import ignore_progress

PAGE, N_PAGES, MAX_LEN = 4, 64, 96
PROMPTS = {0: (5, 6, 7, 8, 9, 10, 11), 1: (3,), 2: tuple(range(20, 50)), 3: (60, 61, 60, 61, 60)}


def watched(ops):
    """Have operations keep the logits of the last step in `seen`."""
    compute = ops.logits

    def logits(x, weight):
        ops.seen = compute(x, weight)
        return ops.seen.clone()

    ops.logits = logits
    return ops


class Machine:
    """Waits for each step. On a GPU it runs the Triton operations, uncaptured."""

    def __init__(self, config, weights, dtype=torch.float32, device="cpu", page=PAGE, n_pages=N_PAGES, max_len=MAX_LEN):
        capacity = Capacity(4, n_pages, page, max_len, 4 * max_len, 8, 2, config.vocab_size)
        with torch.inference_mode():
            tables = make_tables(config, capacity, torch.device(device), dtype)
            results = (tables.result, tables.top_ids, tables.top_logprobs)
            if device == "cpu":
                self.ops, readback, stream = watched(TorchOps(tables)), HostReadback(*results), None
            else:
                from megakernel_runtime.backends.graphs.cuda_readback import CudaReadback
                from megakernel_runtime.backends.graphs.device.ops import TritonOps

                stream = torch.cuda.current_stream()
                self.ops, readback = watched(TritonOps(tables, 132)), CudaReadback(*results, 2, stream)
            self.model = GraphsModel(tables, self.ops, weights, ignore_progress)
        self.stepper = Stepper(tables, self.ops, Executor(self.model, {}), readback, stream)
        self.slots = SlotTable(4, page, n_pages, max_len)

    def step(self, segments):
        """Return the logits of the step, None if nothing was sampled."""
        launch = self.stepper.launch(segments)
        deadline = time.monotonic() + 30.0
        while not launch.ticket.is_done():
            assert time.monotonic() < deadline
        result = launch.ticket.read(waited=True).result
        for segment in segments:
            token = int(result[launch.sampling.index(segment), 0]) if segment.samples else None
            self.slots.advance(segment, token)
        return self.ops.seen.cpu() if launch.sampling else None


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
