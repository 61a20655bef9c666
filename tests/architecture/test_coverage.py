"""What coverage leaves out is device code and what talks to a GPU, each with its reason; the floor is 90 %."""

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "pyproject.toml").read_text()
COVERAGE = tomllib.loads(TEXT)["tool"]["coverage"]
LISTED = subprocess.run(
    ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
DEVICE_CODE = ("megakernel_runtime/kernels/", "megakernel_runtime/backends/graphs/device/")
ON_A_GPU = re.compile(r"\btorch\.cuda\b|\bimport (DeviceMemory|Session)\b")


def needs_a_gpu(name):
    return name.startswith(DEVICE_CODE) or ON_A_GPU.search((ROOT / name).read_text()) is not None


def test_the_floor_is_not_lowered():
    assert COVERAGE["report"]["fail_under"] >= 90
    assert "omit" not in COVERAGE["report"]


@pytest.mark.parametrize("pattern", COVERAGE["run"]["omit"])
def test_what_is_left_out_needs_a_gpu_and_says_why(pattern):
    names = [name for name in LISTED if fnmatch.fnmatch(f"/{name}", pattern)]
    assert names, "it matches no file"
    assert [name for name in names if not needs_a_gpu(name)] == []
    assert re.search(rf'^ +"{re.escape(pattern)}",? +# \w+', TEXT, re.MULTILINE), "it gives no reason"
