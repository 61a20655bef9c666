"""What a machine's facts mean for the backends."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megakernel_runtime import probe as probing
from megakernel_runtime.probe import Gpu, Machine, judge, probe

HOPPER = Gpu("NVIDIA H200", "9.0", 132, 141 * 1024**3)
AMPERE = Gpu("NVIDIA A10", "8.6", 72, 24 * 1024**3)
FULL = Machine(
    python="3.12.1",
    platform="Linux x86_64",
    cpu_threads=8,
    memory_bytes=64 * 1024**3,
    torch="2.13.0",
    torch_error=None,
    cuda="13.0",
    cuda_error=None,
    triton="3.7.1",
    gpus=(HOPPER,),
    backends=("megakernel", "graphs"),
)
NO_GPU = replace(FULL, gpus=(), cuda=None, cuda_error="this torch is a CPU build")


def finding(machine, topic):
    (found,) = [f for f in judge(machine) if f.topic == topic]
    return found


@pytest.mark.parametrize(
    ("machine", "topic", "state", "told"),
    [
        (FULL, "GPU", "ok", "NVIDIA H200: sm_90, 132 SMs, 141 GiB"),
        (FULL, "backend megakernel", "ok", "H200"),
        (FULL, "backend graphs", "ok", "H200"),
        (FULL, "backend cpu", "ok", ""),
        (FULL, "Memory", "ok", "64.0 GiB, 8 CPU threads"),
        (FULL, "PyTorch", "ok", "CUDA 13.0"),
        (replace(FULL, gpus=(AMPERE,)), "backend megakernel", "no", "compute capability 9.0"),
        (replace(FULL, gpus=(AMPERE,)), "backend graphs", "ok", "A10"),
        (replace(FULL, triton=None), "backend megakernel", "no", "not installed"),
        (replace(FULL, triton="3.5.1"), "backend megakernel", "no", "3.5.1"),
        (replace(FULL, triton="3.10.0+git"), "backend megakernel", "ok", ""),
        (replace(FULL, backends=()), "backend megakernel", "no", "not in this version"),
        (replace(FULL, backends=()), "backend graphs", "no", "not in this version"),
        (NO_GPU, "GPU", "note", "CPU build"),
        (NO_GPU, "backend graphs", "no", "needs a CUDA GPU"),
        (NO_GPU, "backend cpu", "ok", ""),
        (NO_GPU, "PyTorch", "ok", "CPU build"),
        (replace(FULL, memory_bytes=1024**3), "Memory", "no", "1.0 GiB"),
        (replace(NO_GPU, torch=None), "PyTorch", "no", "not installed"),
        (replace(NO_GPU, torch=None), "backend cpu", "no", "PyTorch"),
        (replace(NO_GPU, torch_error="libcudart.so missing"), "PyTorch", "no", "libcudart"),
    ],
)
def test_judgement(machine, topic, state, told):
    found = finding(machine, topic)
    assert found.state == state
    assert told in found.detail


def test_this_machine_reports_itself_as_json():
    done = subprocess.run(
        [sys.executable, "-m", "megakernel_runtime.probe"], capture_output=True, text=True, check=True
    )
    topics = {finding["topic"]: finding["state"] for finding in json.loads(done.stdout)}
    assert topics["Python"] == topics["backend cpu"] == "ok"


def test_facts_of_this_machine():
    machine = probe()
    assert machine.cpu_threads >= 1
    assert machine.memory_bytes > 2**28
    assert machine.python == sys.version.split()[0]


@pytest.mark.parametrize(("limit", "expected"), [("1048576", 1048576), ("max", None), (None, None)])
def test_memory_is_what_the_control_group_allows(monkeypatch, tmp_path, limit, expected):
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    unlimited = probe().memory_bytes
    monkeypatch.setattr(probing, "Path", lambda _: tmp_path / "memory.max")
    assert probe().memory_bytes == expected or (expected is None and probe().memory_bytes >= unlimited)


class FakeCuda:
    """torch.cuda of a machine with one GPU, or with a driver that does not start."""

    def __init__(self, fault=None):
        self.fault = fault

    def init(self):
        if self.fault:
            raise RuntimeError(self.fault)

    def device_count(self):
        return 1

    def get_device_properties(self, index):
        return SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1)


@pytest.mark.parametrize("fault", [None, "Found no NVIDIA driver\nmore"])
def test_cuda_devices_and_faults(monkeypatch, fault):
    import torch

    monkeypatch.setattr(torch, "cuda", FakeCuda(fault))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    machine = probe()
    assert machine.cuda == "13.0"
    assert machine.cuda_error == (fault and "Found no NVIDIA driver")
    assert machine.gpus == (() if fault else (Gpu("NVIDIA H200", "9.0", 132, 1),))


def test_a_torch_that_does_not_load_is_a_fact(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert probe().torch_error
    assert finding(probe(), "PyTorch").state == "no"


def test_an_absent_package_is_a_fact():
    assert probing._version("surely-not-installed") is None
