"""Every Triton kernel computes what its twin in torch does: here through Triton's interpreter, in f32."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from tests.unit.backends.graphs.comparisons import comparisons

NAMES = list(comparisons("cpu", torch.float32))


@pytest.fixture(scope="module")
def failed():
    command = [sys.executable, "-m", "tests.unit.backends.graphs.interpret"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_its_twin(failed, name):
    assert failed[name] == ""
