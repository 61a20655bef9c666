"""The one way from a `RuntimeSpec` to a loaded `Runtime`. Imports a backend only when it is asked for.

Must not know: how any backend works.
"""

from __future__ import annotations

from megakernel_runtime.interface import CapacityError, Progress, Runtime, RuntimeSpec

_AUTO = "cpu"  # what "auto" stands for


def load_runtime(spec: RuntimeSpec, progress: Progress) -> Runtime:
    """Return the runtime that `spec` names, loaded. Raises ModelError and CapacityError."""
    match _AUTO if spec.backend == "auto" else spec.backend:
        case "fake":
            from megakernel_runtime.backends.fake import load_fake

            return load_fake(spec, progress)
        case "cpu":
            from megakernel_runtime.backends.cpu.machine import share_cores

            share_cores()  # before the next line imports torch
            from megakernel_runtime.backends.cpu.runtime import load_cpu

            return load_cpu(spec, progress)
        case unknown:
            raise CapacityError(f"backend {unknown!r} is not in this version; choose auto, cpu or fake")
