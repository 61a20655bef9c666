"""The one way from a `RuntimeSpec` to a loaded `Runtime`. Imports a backend only when it is asked for.

Must not know: how any backend works.
"""

from __future__ import annotations

from megakernel_runtime.interface import CapacityError, Progress, Runtime, RuntimeSpec


def load_runtime(spec: RuntimeSpec, progress: Progress) -> Runtime:
    """Return the runtime that `spec` names, loaded. Raises ModelError and CapacityError."""
    if spec.backend == "fake":
        from megakernel_runtime.backends.fake import load_fake

        return load_fake(spec, progress)
    raise CapacityError(f"backend {spec.backend!r} is not available on this machine; choose fake")
