"""The default model's real weights: the reference against Hugging Face in fp32, the server's default against generate."""

import pytest
import torch

from megakernel_runtime.backends.cpu.runtime import load_cpu
from megakernel_runtime.interface import PrefillRow, RuntimeSpec, SamplingParams, SlotAdmit, StepPlan
from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.weights.load import load_weights
from tests.answers import N_TOKENS, greedy_answers, load_hugging_face
from tests.program.programs import admit, decode, ignore_progress, interpreter, prefill, relative_error

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # twelve generations in fp32, twice, on two cores


@pytest.fixture(scope="module")
def generated(real_model_path):
    return greedy_answers(real_model_path)


def test_reference_logits_equal_hugging_face(real_model_path, generated):
    model, _ = load_hugging_face(real_model_path)
    config = read_config(real_model_path)
    weights = load_weights(real_model_path, config, progress=ignore_progress)
    machine, slots = interpreter(config, weights, page=16, n_pages=16)
    prompt, answer = generated[2].prompt, generated[2].tokens
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt + answer])).logits[0]
    admit(slots, 0, prompt, range(16))
    machine.step([prefill(slots, 0, 0, len(prompt) - 7)])
    machine.step([prefill(slots, 0, len(prompt) - 7, 7)])
    seen = [machine.logits[0]]
    for token in answer[:8]:
        assert decode(slots, 0).slot.tokens[-1] == token
        machine.step([decode(slots, 0)])
        seen.append(machine.logits[0])
    assert relative_error(torch.stack(seen), theirs[len(prompt) - 1 :][: len(seen)]) < 1e-4


@pytest.fixture(scope="module", params=["auto", "fp32"])
def runtime(request, real_model_path):
    runtime = load_cpu(
        RuntimeSpec("cpu", str(real_model_path), weight_format=request.param, max_slots=16, kv_memory_bytes=2**28),
        ignore_progress,
    )
    yield runtime
    runtime.close()


def test_greedy_tokens_equal_generate_in_one_batch(runtime, generated):
    """All prompts at once: chunked prefill beside decoding rows, pages of all sequences interleaved."""
    size = runtime.capacity.page_size_tokens
    n = len(generated)
    plan_id, results = 0, []

    def run(**plan):
        nonlocal plan_id
        plan_id += 1
        runtime.submit(StepPlan(plan_id, **plan))
        while not results or not (results[-1].plan_id == plan_id and results[-1].last):
            results.extend(runtime.poll(0.0))

    sampling = SamplingParams(temperature=0.0, max_tokens=N_TOKENS)
    for index, (_, prompt, answer, _) in enumerate(generated):
        pages = tuple(index + n * i for i in range(-(-(len(prompt) + len(answer)) // size)))
        admitted = SlotAdmit(index, tuple(prompt), len(prompt), sampling, pages=pages)
        run(admits=(admitted,), prefill=(PrefillRow(index, 0, 20),), decode=tuple(range(index)))
        run(prefill=(PrefillRow(index, 20, len(prompt) - 20),), decode=tuple(range(index)))
    while any(t.finish is None for r in results[-1:] for t in r.tokens):
        run(decode=tuple(range(n)), lease_steps=8)
    tokens = [[t.token for r in results for t in r.tokens if t.slot == i] for i in range(n)]
    assert tokens == [answer.tokens for answer in generated]
