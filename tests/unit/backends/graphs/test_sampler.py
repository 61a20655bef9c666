"""The sampler that works on slots' words against the reference that works on their parameters, over many steps."""

from dataclasses import replace

import pytest
import torch

from megakernel_runtime.backends.graphs.torch_ops import TorchOps
from megakernel_runtime.device_state.fields import Outcome
from megakernel_runtime.interface import FinishReason
from megakernel_runtime.program.reference.sampling import Sampler
from megakernel_runtime.program.slots import SlotTable
from tests.unit.backends.graphs.scenes import (
    TINY,
    capacity_of,
    drawn,
    make_scene,
    plain_menu,
    sampling_menu,
    segments_of,
)

FINISH = {FinishReason.STOP: Outcome.STOP, FinishReason.LENGTH: Outcome.LENGTH, None: Outcome.RUNS}
DECODING = tuple((n, n - 1) for n in range(20, 30))


def reference_slots(config, sampling):
    capacity = capacity_of(config)
    table = SlotTable(capacity.max_slots, 8, capacity.n_pages, capacity.max_model_len_tokens)
    return table, segments_of(config, table, 0, 8, decoding=DECODING, chunks=(), sampling=sampling)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("menu", [plain_menu, sampling_menu])
def test_same_tokens_logprobs_and_ends_as_the_reference(menu, ties):
    config = replace(TINY, vocab_size=200)
    scene = make_scene(config, "cpu", decoding=DECODING, chunks=(), sampling=menu, full=menu is sampling_menu)
    t, ops, sampler = scene.tables, TorchOps(scene.tables), Sampler()
    table, segments = reference_slots(config, menu)
    compared = 0
    for step in range(12):
        ops.embed(scene.shape, torch.zeros(200, config.hidden_size))
        logits = drawn((10, 200), step, "cpu", scale=3.0)
        logits = logits.round() if ties else logits
        live = [o for o, s in enumerate(segments) if s.slot.finish is None]
        choices = sampler.sample(logits[live].clone(), [segments[o].slot for o in live])
        ops.sample(scene.shape, logits.clone())
        for o, choice in zip(live, choices, strict=True):
            segment = replace(segments[o], start=len(segments[o].slot.tokens) - 1, count=1, samples=True)
            finish = table.advance(segment, choice.token)
            token, outcome, logprob, _ = t.result[o].tolist()
            assert (token, Outcome(outcome)) == (choice.token, FINISH[finish]), f"output {o}, step {step}"
            if choice.logprob is not None:
                assert torch.tensor(logprob, dtype=torch.int32).view(torch.float32).item() == pytest.approx(
                    choice.logprob, abs=1e-5
                )
                n = len(choice.top)
                assert t.top_ids[o, :n].tolist() == [i for i, _ in choice.top]
                assert t.top_logprobs[o, :n].tolist() == pytest.approx([v for _, v in choice.top], abs=1e-5)
            compared += 1
        finished = [o for o in range(10) if o not in live]
        assert all(t.result[o, 1] == Outcome.SKIPPED for o in finished)
    assert compared > 30
