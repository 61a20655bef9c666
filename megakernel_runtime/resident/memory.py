"""Everything the resident kernel reads and writes, allocated once, and its launch. Must not know: plans, results."""

# pyright: basic
# Triton is untyped.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megakernel_runtime.kernels import words as w
from megakernel_runtime.kernels.memory import Memory
from megakernel_runtime.kernels.shape import KernelShape
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.placement import Placement
from megakernel_runtime.program.validate import Image, validate
from megakernel_runtime.resident.layout import code_of
from megakernel_runtime.resident.tape import pack_tape
from megakernel_runtime.resident.vectors import biases, qk_norms, rope_tables

LINE = 32  # words of a cache line
COUNTERS = ("LM heads that are done", "samplers that are done", "steps published")


class DeviceMemory:
    """The kernel's arguments. `plans`, `packets`, `head`, `steps`, `tokens` are views of pinned memory for the host."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        shape: KernelShape,
        placement: Placement,
        *,
        kv: torch.Tensor,
        state: torch.Tensor,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Pack the tape and allocate. kv: (layers, pages, 2, kv heads, page, head_dim) bf16; state: the slots' arena,
        i32, `shape.state_words`.
        """
        assert kv.numel() == shape.layers * shape.n_pages * 2 * shape.kv * shape.page
        assert state.numel() == shape.state_words
        self.shape = shape
        self.device = kv.device
        tape = pack_tape(config, weights, placement, self.device, progress)
        self.tape_bytes = tape.tiles.numel() * 2
        self._tape = tape.tiles
        meta, code = code_of(shape, placement, tape.starts, tape.counts)
        n_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        n_tiles = len(tape.tiles) // 8
        validate(Image(config, shape, placement, meta, code, tape.starts, tape.counts, n_tiles, n_sms))
        pinned = _pinned_parts(shape)
        self.plans, self.packets, self.head, self.steps, self.tokens = (part.numpy() for part in pinned.values())
        parts = pinned | self._constants(config, weights) | self._working(len(placement.tasks[0]))
        parts |= {
            "kv": kv,
            "state": state,
            "meta": torch.tensor(meta, dtype=torch.int32, device=self.device),
            "code": torch.tensor(code, dtype=torch.int32, device=self.device),
        }
        self.parts = {name: parts[name] for name in Memory._fields}
        torch.cuda.synchronize(self.device)

    def _constants(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        cos, sin = rope_tables(config, self.shape.max_len, self.device)
        return {
            "table": weights["embed"].to(device=self.device, dtype=torch.bfloat16).contiguous(),
            "bias": biases(config, weights, self.device),
            "qk_norms": qk_norms(config, weights, self.device),
            "cos": cos,
            "sin": sin,
        }

    def _working(self, n_instructions: int) -> dict[str, torch.Tensor]:
        shape, zeros = self.shape, self._zeros
        n_profiled = n_instructions * shape.grid * 3 if shape.profile else 1
        return {
            "acts": zeros(2 * shape.step_elements, dtype=torch.bfloat16),
            "partials": zeros(shape.partial_words, dtype=torch.int64),
            "resid": zeros(shape.rows, shape.hidden, dtype=torch.float32),
            "relay": zeros(LINE),
            "cmd": zeros(2, w.CMD_WORDS),
            "local": zeros(shape.grid, shape.rows, 8),
            "leave": zeros(shape.grid * LINE),
            "accounts": zeros(shape.grid, w.ACCOUNTS, dtype=torch.int64),
            "logits": zeros(shape.rows, shape.vocab, dtype=torch.float32),
            "best": zeros(shape.grid, shape.rows, 2),
            "counters": zeros(len(COUNTERS) * LINE),
            "abort": zeros(LINE),
            "prof": zeros(n_profiled, dtype=torch.int64),
        }

    def _zeros(self, *size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def empty(self) -> None:
        """Make ready for a launch on the current stream: no word is written, no counter counts, nobody has given up."""
        self.parts["acts"].view(torch.int16).fill_(-1)
        self.parts["partials"].fill_(-1)
        for name in ("counters", "cmd", "leave"):
            self.parts[name].zero_()
        self.parts["abort"][: LINE // 4].zero_()  # behind it stands what tests ask for

    def launch(self, done: int, park_ns: int, nonce: int) -> None:
        """Launch on the current stream; see kernels/entry.py."""
        from megakernel_runtime.kernels.entry import megakernel

        kernel: Any = megakernel
        kernel[(self.shape.grid,)](self._tape, *self.parts.values(), done, park_ns, nonce, self.shape, num_warps=8)

    def fault_record(self) -> list[int]:
        """Return the words of `abort` once the kernel has left."""
        return self.parts["abort"].tolist()

    def name_of(self, address: int) -> str:
        """Return which part an address of GPU memory lies in, and where."""
        for name, part in self.parts.items():
            at = address - part.data_ptr()
            if 0 <= at < part.numel() * part.element_size():
                if name == "counters":
                    return f"the count of {COUNTERS[at // 4 // LINE]}"
                return f"element {at // part.element_size()} of {name}"
        return f"address {address:#x}"


def _pinned_parts(shape: KernelShape) -> dict[str, torch.Tensor]:
    sizes = {
        "plans": (w.PLANS, w.RECORD),
        "packets": (w.PACKETS, 2),
        "head": (16,),
        "steps": (w.RESULTS, w.STEP_WORDS),
        "results": (w.RESULTS, shape.rows, w.TOKEN_WORDS),
    }
    return {name: torch.zeros(size, dtype=torch.int32, pin_memory=True) for name, size in sizes.items()}
