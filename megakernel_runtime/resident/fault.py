"""What a wait that gave up left behind, in words for people. Must not know: launches, plans."""

from __future__ import annotations

from dataclasses import dataclass

from megakernel_runtime.kernels import words as w
from megakernel_runtime.program.isa import Op
from megakernel_runtime.resident.memory import DeviceMemory

# Tags below the first instruction's, see kernels/step.py
_BETWEEN_STEPS = {1: "the end of the step before", 2: "the next step", 3: "the end of the step"}
_RING = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Fault:
    """Where and for what the kernel waited in vain."""

    sm: int
    instruction: str  # "DOWN of layer 3", or what else was awaited
    awaited: str  # where in the kernel's memory
    expected: int
    seen: int

    def __str__(self) -> str:
        """Return one line for the log."""
        return (
            f"the kernel gave up waiting: SM {self.sm}, {self.instruction}, for {self.awaited}: expected "
            f"{self.expected}, seen {self.seen}"
        )


def read_fault(memory: DeviceMemory) -> Fault | None:
    """Return the record of a kernel that has left, None if it left in peace."""
    record = memory.fault_record()
    tag = record[w.ABORT_TAG] & 0xFFFFFFFF
    if tag == 0:
        return None
    where = (record[w.ABORT_WHERE] & 0xFFFFFFFF) | (record[w.ABORT_WHERE + 1] & 0xFFFFFFFF) << 32
    awaited = "a weight tile" if tag == _RING else memory.name_of(where)
    return Fault(record[w.ABORT_SM], _what(tag), awaited, record[w.ABORT_EXPECTED], record[w.ABORT_SEEN])


def _what(tag: int) -> str:
    if tag == _RING:
        return "weight ring"
    if tag in _BETWEEN_STEPS:
        return _BETWEEN_STEPS[tag]
    op = Op((tag >> 16) - 1)
    return f"{op.name} of layer {tag & 0xFFFF}"
