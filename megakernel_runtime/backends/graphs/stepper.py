"""One step on one device: from segments of slots to a launched step whose results will come back.

Sends what of slots and rows is new, chooses the shape, runs it. A decode step like the one before sends nothing.
Must not know: plans, leases, what tokens mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakernel_runtime.backends.graphs.executor import Executor
from megakernel_runtime.backends.graphs.frame import Frame, make_frame
from megakernel_runtime.backends.graphs.ops import Ops, Tables
from megakernel_runtime.backends.graphs.readback import Readback, Ticket
from megakernel_runtime.backends.graphs.shapes import Shape
from megakernel_runtime.device_state.state import Update
from megakernel_runtime.device_state.words import tensor_of
from megakernel_runtime.program.slots import Segment


@dataclass(frozen=True, slots=True)
class Launch:
    """A step that was given to the device."""

    segments: tuple[Segment, ...]
    sampling: tuple[Segment, ...]  # those that give a token, in the order of the results
    ticket: Ticket
    shape: Shape
    n_kernels: int  # replayed from a graph; 0: not captured


class Stepper:
    """Everything of a loaded model that a step needs. All device work goes to one stream, in the order of launches."""

    def __init__(
        self, tables: Tables, ops: Ops, executor: Executor, readback: Readback, stream: torch.cuda.Stream | None
    ) -> None:
        self._tables = tables
        self._ops = ops
        self._executor = executor
        self._readback = readback
        self._stream = stream
        self._sent: object = None  # what the device has as its frame

    def launch(self, segments: Sequence[Segment]) -> Launch:
        """Give the device a step over `segments`, which are of distinct slots and not advanced yet."""
        state = self._tables.state
        with torch.inference_mode(), self._on_stream():
            self._readback.start()
            full = state.sync([segment.slot for segment in segments])
            self._update(state.take())
            frame = make_frame(segments, full=full)
            shape = self._executor.fit(frame.needs)
            self._send(frame, shape)
            n_kernels = self._executor.run(shape)
            ticket = self._readback.finish(len(frame.sampling), full=shape.full)
        return Launch(tuple(segments), frame.sampling, ticket, shape, n_kernels)

    def close(self) -> None:
        """Wait for the device, and forget all that lies on it."""
        with suppress(RuntimeError):  # of a device that has failed
            if self._stream is not None:
                self._stream.synchronize()
            del self._tables, self._ops, self._executor, self._readback
            if self._stream is not None:
                torch.cuda.empty_cache()

    def _update(self, update: Update) -> None:
        arena = self._tables.state.arena
        for first, n in update.clears:
            arena[first : first + n].zero_()
        if len(update.addresses):
            packet = tensor_of(np.stack((update.addresses, update.words)))
            self._ops.write_words(self._sendable(packet).to(arena.device, non_blocking=True))

    def _send(self, frame: Frame, shape: Shape) -> None:
        if self._sent == (frame.key, shape):
            return
        words = self._sendable(self._tables.frame.fill(frame, shape))
        self._tables.frame.words[: len(words)].copy_(words, non_blocking=True)
        self._sent = (frame.key, shape)

    def _sendable(self, words: Tensor) -> Tensor:
        """Return words in memory that the device can read by itself; torch keeps it until the device has."""
        return words if self._stream is None else words.pin_memory()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
