"""What an engine process is started with, as one JSON argument. Must not know: who starts it."""

from __future__ import annotations

import msgspec

from megakernel_runtime.interface import RuntimeSpec
from server.scheduling.settings import SchedulerSettings

EXIT_FAULT = 70  # the runtime or the engine itself failed: start it again
EXIT_LOAD_FAILED = 78  # the model cannot be served: do not


class EngineSpec(msgspec.Struct, frozen=True):
    """The runtime to load, how to schedule on it, how to log."""

    runtime: RuntimeSpec
    scheduler: SchedulerSettings
    stall_timeout_s: float = 60.0  # without any step ending, the device is taken for dead
    log_level: str = "info"
    log_format: str = "json"


def encode_spec(spec: EngineSpec) -> str:
    """Return the JSON argument."""
    return msgspec.json.encode(spec).decode()


def decode_spec(text: str) -> EngineSpec:
    """Return the spec that `encode_spec` wrote. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return msgspec.json.decode(text, type=EngineSpec)
