"""The runtime contract on every backend that runs without a GPU."""

import json
from dataclasses import replace

import pytest

from megakernel_runtime.factory import load_runtime
from megakernel_runtime.interface import RuntimeSpec
from tests.program.programs import ignore_progress
from tests.unit.backends.contract import MAX_LEN, MAX_SLOTS, MAX_STEP_TOKENS, N_PAGES, PAGE, Contract, Driver

SIZES = RuntimeSpec(
    "",
    "",
    max_slots=MAX_SLOTS,
    max_model_len_tokens=MAX_LEN,
    max_step_tokens=MAX_STEP_TOKENS,
    page_size_tokens=PAGE,
    n_pages=N_PAGES,
)


@pytest.fixture(scope="module")
def tiny_path(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("qwen3", seed=3, num_hidden_layers=2).save_pretrained(path)
    return path


class TestCpu(Contract):
    @pytest.fixture
    def driver(self, tiny_path):
        spec = replace(SIZES, backend="cpu", model_path=str(tiny_path), threads=1, weight_format="fp32")
        runtime = load_runtime(spec, ignore_progress)
        yield Driver(runtime)
        runtime.close()


class TestFake(Contract):
    @pytest.fixture
    def driver(self):
        script = json.dumps({"vocab_size": 131, "max_lease_steps": 8, "max_plans_ahead": 2})
        runtime = load_runtime(replace(SIZES, backend="fake", fake_script=script), ignore_progress)
        yield Driver(runtime)
        runtime.close()
