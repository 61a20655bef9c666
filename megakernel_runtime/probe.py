"""What this machine has for running models, and what can therefore run: `python -m megakernel_runtime.probe`.

Prints findings as JSON. Runs in a process of its own, since importing torch takes seconds and a broken driver may take
the process down. Must not know: models, servers, how findings are shown.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MEGAKERNEL_CAPABILITIES = ("9.0",)  # what its device code is written for: Hopper's TMA, mbarriers and mma
LEAST_MEMORY_BYTES = 2 * 1024**3  # the default model takes 1.6 GB
LEAST_TRITON = (3, 6)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device. `compute_capability` is e.g. "9.0"."""

    name: str
    compute_capability: str
    n_sms: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A "no" says in `remedy` what would change it, where anything would."""

    topic: str
    state: str  # ok | note | no
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. Versions are None for packages that are not installed; errors are the importer's own words."""

    python: str
    platform: str
    cpu_threads: int  # that this process may use
    memory_bytes: int
    torch: str | None
    torch_error: str | None
    cuda: str | None  # version that torch was built for; None: a CPU build
    cuda_error: str | None  # why torch sees no device
    triton: str | None
    gpus: tuple[Gpu, ...]
    backends: tuple[str, ...]  # of the GPU, that this version has code for


def probe() -> Machine:
    """Return what this machine has. Never raises for what is missing or broken."""
    torch_error, cuda, cuda_error, gpus = _cuda()
    return Machine(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu_threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        torch=_version("torch"),
        torch_error=torch_error,
        cuda=cuda,
        cuda_error=cuda_error,
        triton=_version("triton"),
        gpus=gpus,
        backends=tuple(name for name in ("megakernel", "graphs") if _has_backend(name)),
    )


def judge(machine: Machine) -> tuple[Finding, ...]:
    """Return what the facts mean, most basic first; the last three tell which backends run."""
    return (
        Finding("Python", "ok", f"{machine.python} on {machine.platform}"),
        _judge_memory(machine),
        _judge_torch(machine),
        *(
            Finding(
                "GPU",
                "ok",
                f"{gpu.name}: sm_{gpu.compute_capability.replace('.', '')}, {gpu.n_sms} SMs, "
                f"{gpu.memory_bytes / 1024**3:.0f} GiB",
            )
            for gpu in machine.gpus
        ),
        *(() if machine.gpus else (Finding("GPU", "note", f"none: {machine.cuda_error or 'no CUDA device'}"),)),
        _judge_cpu(machine),
        _judge_graphs(machine),
        _judge_megakernel(machine),
    )


def _judge_memory(machine: Machine) -> Finding:
    detail = f"{machine.memory_bytes / 1024**3:.1f} GiB, {machine.cpu_threads} CPU threads"
    if machine.memory_bytes >= LEAST_MEMORY_BYTES:
        return Finding("Memory", "ok", detail)
    return Finding("Memory", "no", detail, f"the default model needs {LEAST_MEMORY_BYTES / 1024**3:.0f} GiB")


def _judge_torch(machine: Machine) -> Finding:
    if machine.torch is None:
        return Finding("PyTorch", "no", "not installed", "pip install 'torch>=2.11,<2.14'")
    if machine.torch_error:
        return Finding("PyTorch", "no", f"{machine.torch} does not load: {machine.torch_error}", "reinstall torch")
    return Finding("PyTorch", "ok", f"{machine.torch}, {f'CUDA {machine.cuda}' if machine.cuda else 'CPU build'}")


def _judge_cpu(machine: Machine) -> Finding:
    if machine.torch is None or machine.torch_error:
        return Finding("backend cpu", "no", "needs PyTorch")
    return Finding("backend cpu", "ok", "runs on every machine")


def _judge_graphs(machine: Machine) -> Finding:
    if not machine.gpus:
        return Finding("backend graphs", "no", "needs a CUDA GPU that PyTorch sees")
    if "graphs" not in machine.backends:
        return Finding("backend graphs", "no", "not in this version")
    return Finding("backend graphs", "ok", f"runs on {machine.gpus[0].name}")


def _judge_megakernel(machine: Machine) -> Finding:
    topic = "backend megakernel"
    fitting = [gpu for gpu in machine.gpus if gpu.compute_capability in MEGAKERNEL_CAPABILITIES]
    if not fitting:
        return Finding(topic, "no", f"needs a GPU of compute capability {' or '.join(MEGAKERNEL_CAPABILITIES)}")
    if machine.triton is None or _release(machine.triton) < LEAST_TRITON:
        needed = ".".join(map(str, LEAST_TRITON))
        return Finding(topic, "no", f"Triton is {machine.triton or 'not installed'}", f"pip install 'triton>={needed}'")
    if "megakernel" not in machine.backends:
        return Finding(topic, "no", "not in this version")
    return Finding(topic, "ok", f"runs on {fitting[0].name}")


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "3.10.0+git1" -> (3, 10)."""
    return tuple(int(part) for part in version.split(".")[:2])


def _cuda() -> tuple[str | None, str | None, str | None, tuple[Gpu, ...]]:
    """Return (torch import error, CUDA version of the build, why no device, devices)."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return str(error), None, None, ()
    if torch.version.cuda is None:
        return None, None, "this torch is a CPU build", ()
    try:
        torch.cuda.init()
        gpus = tuple(_gpu(torch.cuda, index) for index in range(torch.cuda.device_count()))
    except (RuntimeError, AssertionError) as error:
        return None, torch.version.cuda, str(error).splitlines()[0], ()
    return None, torch.version.cuda, None, gpus


def _gpu(cuda: Any, index: int) -> Gpu:
    """Translate what `cuda` (torch.cuda, which does not type it) says of one device."""
    properties = cuda.get_device_properties(index)
    return Gpu(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        n_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
    )


def _memory_bytes() -> int:
    """Return this machine's memory, or less where the control group allows less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control groups, or "max"
        return total


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_backend(name: str) -> bool:
    return importlib.util.find_spec(f"megakernel_runtime.backends.{name}") is not None


if __name__ == "__main__":
    json.dump([asdict(finding) for finding in judge(probe())], sys.stdout)
