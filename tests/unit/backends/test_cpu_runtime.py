import json
import subprocess
import sys

import pytest
import torch

from megakernel_runtime.backends.cpu.linear import default_format
from megakernel_runtime.factory import load_runtime
from megakernel_runtime.interface import (
    CapacityError,
    ModelError,
    PrefillRow,
    RuntimeFault,
    RuntimeSpec,
    SamplingParams,
    StepPlan,
)
from tests.program.programs import ignore_progress
from tests.unit.backends.contract import Driver


@pytest.fixture(scope="module")
def tiny_path(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", seed=3).save_pretrained(path)
    return path


def spec(path, **kw):
    return RuntimeSpec(**({"backend": "cpu", "model_path": str(path), "threads": 1, "max_slots": 4} | kw))


def load(path, **kw):
    return load_runtime(spec(path, **kw), ignore_progress)


def generate(runtime, n=12, **sampling):
    driver = Driver(runtime)
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": n} | sampling))
    first = driver.start(0, (3, 1, 4, 1, 5), params, pages=(5, 2, 4))
    rest = [t.token for _ in range(n - 1) for t in driver.run(decode=(0,))[-1].tokens]
    return [first.token, *rest]


def test_names_and_sizes(tiny_path):
    runtime = load(tiny_path)
    info = runtime.info
    assert info.backend == "cpu"
    assert info.device == f"CPU, 1 threads, {default_format()} weights"
    assert info.model == "LlamaForCausalLM 0M"
    assert info.weight_bytes > 0
    assert info.kv_bytes > 0


@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_greedy_equals_hugging_face(tiny_path, tiny_model, backend):
    model = tiny_model("llama", seed=3)
    with torch.inference_mode():
        theirs = model.generate(
            torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert generate(load(tiny_path, backend=backend)) == theirs[0, 5:].tolist()


def test_same_seed_same_tokens(tiny_path):
    runtimes = [load(tiny_path) for _ in range(2)]
    drawn = [generate(r, temperature=1.0, seed=8) for r in runtimes]
    assert drawn[0] == drawn[1]
    assert generate(load(tiny_path), temperature=1.0, seed=9) != drawn[0]


def test_random_weights_need_no_weights(tiny_path, tmp_path):
    (tmp_path / "config.json").write_text((tiny_path / "config.json").read_text())
    a, b = (generate(load(tmp_path, random_weights=True)) for _ in range(2))
    assert a == b
    with pytest.raises(ModelError):
        load(tmp_path)


def test_progress_counts_up_to_its_total(tiny_path):
    told = []
    load_runtime(spec(tiny_path), lambda phase, done, total: told.append((phase, done, total)))
    assert list(dict.fromkeys(phase for phase, _, _ in told)) == ["weights", "pack"]
    for phase in ("weights", "pack"):
        done = [(d, t) for p, d, t in told if p == phase]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1]


def test_unknown_choices_are_refused(tiny_path):
    with pytest.raises(CapacityError, match="weight format 'int3' is unknown; choose auto, fp32, fp16"):
        load(tiny_path, weight_format="int3")
    with pytest.raises(
        CapacityError, match="backend 'tpu' is not in this version; choose auto, megakernel, graphs, eager, cpu or fake"
    ):
        load(tiny_path, backend="tpu")


def test_bytes_streamed_grow_by_weights_and_context(tiny_path):
    runtime = load(tiny_path)
    driver = Driver(runtime)
    driver.start(0, (1, 2, 3), pages=(0,))
    before = runtime.telemetry().bytes_streamed
    driver.run(decode=(0,))
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head_dim, f32
    assert runtime.telemetry().bytes_streamed - before == runtime.info.weight_bytes + 4 * token_bytes


def test_what_torch_refuses_is_a_fault(tiny_path):
    driver = Driver(load(tiny_path))
    with pytest.raises(RuntimeFault, match="a step failed: index 131 is out of bounds"):
        driver.start(0, (1, 131), pages=(0,))


def test_a_closed_runtime_does_nothing(tiny_path):
    runtime = load(tiny_path)
    runtime.close()
    with pytest.raises(RuntimeFault, match="closed"):
        runtime.poll(0.0)
    with pytest.raises(RuntimeFault, match="closed"):
        runtime.submit(StepPlan(1))
    assert runtime.telemetry().wait_host_ns > 0


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (StepPlan(2), "plan 2 was submitted after plan 0"),
        (StepPlan(1, lease_steps=0), "a lease of 0 steps"),
        (StepPlan(1, lease_steps=1000), "a lease of 1000 steps"),
        (StepPlan(1, prefill=(PrefillRow(1, 0, 1),), decode=(1,)), "names a slot twice"),
        (StepPlan(1, prefill=(PrefillRow(1, 0, 127),), decode=(0, 2)), "has 129 rows; 128 fit"),
    ],
)
def test_plans_that_cannot_be_are_refused_at_once(tiny_path, plan, says):
    runtime = load(tiny_path)
    with pytest.raises(RuntimeFault, match=says):
        runtime.submit(plan)


def test_a_mix_of_sampling_parameters_in_one_step(tiny_path):
    runtime = load(tiny_path)
    driver = Driver(runtime)
    menu = [
        SamplingParams(temperature=0.0, max_tokens=9, top_logprobs=2),
        SamplingParams(temperature=1.0, seed=4, top_p=0.8, max_tokens=9),
        SamplingParams(temperature=0.0, frequency_penalty=1.5, max_tokens=9),
    ]

    def tokens(slots):
        first = [driver.start(s, (3, 1, 4), menu[s], pages=(s,)) for s in slots]
        second = driver.run(decode=tuple(slots))[0].tokens
        driver.run(releases=tuple(slots))
        return {s: (a.token, b.token) for s, a, b in zip(slots, first, second, strict=True)}

    together = tokens([0, 1, 2])
    assert together == tokens([0]) | tokens([1]) | tokens([2])


PROGRAM = """
import json, sys
from megakernel_runtime.factory import load_runtime
from megakernel_runtime.interface import RuntimeSpec
assert "torch" not in sys.modules
load_runtime(RuntimeSpec("cpu", sys.argv[1], threads=1), lambda phase, done, total: None)
import os
print(json.dumps({"spin": os.environ["GOMP_SPINCOUNT"], "transformers": "transformers" in sys.modules}))
"""


def test_loading_sets_how_threads_wait_before_torch_and_needs_no_transformers(tiny_path):
    out = subprocess.run([sys.executable, "-c", PROGRAM, str(tiny_path)], capture_output=True, text=True, check=True)
    told = json.loads(out.stdout)
    assert int(told["spin"]) < 100_000
    assert told["transformers"] is False
