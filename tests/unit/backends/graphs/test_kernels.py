"""Every Triton kernel computes what its twin in torch does: here through Triton's interpreter, in f32."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from tests.unit.backends.graphs.comparisons import comparisons

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # the interpreter is slow

NAMES = list(comparisons("cpu", torch.float32))


@pytest.fixture(scope="module")
def failed():
    """What went wrong, by name. Two processes share the work, and are not traced: that would take three times as long."""
    command = [sys.executable, "-m", "tests.unit.backends.graphs.interpret"]
    untraced = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    halves = [
        subprocess.Popen([*command, *names], env=untraced, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for names in (NAMES[::2], NAMES[1::2])
    ]
    results = {}
    for half in halves:
        out, err = half.communicate()
        assert half.returncode == 0, err
        results |= json.loads(out)
    return results


@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_its_twin(failed, name):
    assert failed[name] == ""
