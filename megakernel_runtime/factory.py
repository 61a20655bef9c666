"""The one way from a `RuntimeSpec` to a loaded `Runtime`. Imports a backend only when it is asked for.

Must not know: how any backend works.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from megakernel_runtime.interface import CapacityError, Progress, Runtime, RuntimeSpec

logger = logging.getLogger(__name__)


def load_runtime(spec: RuntimeSpec, progress: Progress) -> Runtime:
    """Return the runtime that `spec` names, loaded. "auto" is the fastest that this machine has.

    Raises ModelError and CapacityError.
    """
    if spec.backend == "auto":
        spec = replace(spec, backend=_fastest(spec))
    match spec.backend:
        case "fake":
            from megakernel_runtime.backends.fake import load_fake

            return load_fake(spec, progress)
        case "cpu":
            from megakernel_runtime.backends.cpu.machine import share_cores

            share_cores()  # before the next line imports torch
            from megakernel_runtime.backends.cpu.runtime import load_cpu

            return load_cpu(spec, progress)
        case "megakernel":
            from megakernel_runtime.backends.megakernel.load import load_megakernel

            return load_megakernel(spec, progress)
        case "graphs" | "eager":
            from megakernel_runtime.backends.graphs.load import load_graphs

            return load_graphs(spec, progress)
        case unknown:
            raise CapacityError(
                f"backend {unknown!r} is not in this version; choose auto, megakernel, graphs, eager, cpu or fake"
            )


def _fastest(spec: RuntimeSpec) -> str:
    """Return megakernel if GPU and model are made for it, else graphs if there is a GPU, else cpu."""
    from megakernel_runtime.backends.cpu.machine import share_cores

    share_cores()  # before the next line imports torch
    from megakernel_runtime.backends.graphs.load import cuda_device

    try:
        cuda_device("graphs")
    except CapacityError:
        return "cpu"
    from megakernel_runtime.backends.megakernel.load import check_model, megakernel_device

    try:
        megakernel_device()
        check_model(spec)
    except CapacityError as reason:
        logger.info("backend graphs: %s", reason)
        return "graphs"
    return "megakernel"
