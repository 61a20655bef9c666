"""The runtime contract on the graphs backend's operations in torch, on the host; tests/kernel has it on a GPU."""

from dataclasses import replace

import pytest

from megakernel_runtime.backends.graphs.load import host_device, load_on
from tests.program.programs import ignore_progress
from tests.unit.backends.contract import Contract, Driver
from tests.unit.backends.test_contract import SIZES


@pytest.fixture(scope="module")
def tiny_path(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("qwen3", seed=3, num_hidden_layers=2).save_pretrained(path)
    return path


class TestHost(Contract):
    @pytest.fixture
    def driver(self, tiny_path):
        spec = replace(SIZES, backend="eager", model_path=str(tiny_path), weight_format="fp32")
        runtime = load_on(host_device(), spec, ignore_progress)
        yield Driver(runtime)
        runtime.close()
