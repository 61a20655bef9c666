"""The CPU runtime: sizes from the machine, weights from the model's files, steps in `poll`, sampling by the reference.

Must not know: requests, text, how a plan came about, how a matrix is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megakernel_runtime.backends.cpu.batch import BatchMaker
from megakernel_runtime.backends.cpu.linear import FORMATS, Matrix, default_format
from megakernel_runtime.backends.cpu.machine import usable_threads
from megakernel_runtime.backends.cpu.model import CpuModel
from megakernel_runtime.backends.cpu.sizes import choose_capacity
from megakernel_runtime.backends.plan_runner import PlanRunner
from megakernel_runtime.interface import (
    Capacity,
    CapacityError,
    DeviceInfo,
    Progress,
    RuntimeFault,
    RuntimeSpec,
    SamplingParams,
    StepPlan,
    StepResult,
    Telemetry,
)
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.models.read_config import read_config
from megakernel_runtime.models.registry import family
from megakernel_runtime.program.reference.sampling import Sampler
from megakernel_runtime.program.slots import Choice, Segment, Slot, SlotTable
from megakernel_runtime.weights.load import load_weights
from megakernel_runtime.weights.random_weights import random_weights

_RANDOM_SEED = 0


def load_cpu(spec: RuntimeSpec, progress: Progress) -> CpuRuntime:
    """Return a loaded CPU runtime, warm. Raises ModelError and CapacityError."""
    weight_format = default_format() if spec.weight_format == "auto" else spec.weight_format
    if weight_format not in FORMATS:
        raise CapacityError(f"weight format {spec.weight_format!r} is unknown; choose auto, {', '.join(FORMATS)}")
    torch.set_num_threads(spec.threads or usable_threads())
    path = Path(spec.model_path)
    config = read_config(path)
    capacity = choose_capacity(spec, config, weight_format)
    weights: Mapping[str, Matrix]
    if spec.random_weights:
        weights = random_weights(config, _RANDOM_SEED)
    else:
        weights = load_weights(path, config, progress=progress, keep_quantized=True)
    return CpuRuntime(config, weights, weight_format, capacity, progress)


class CpuRuntime:
    """A model on the host's processor. The work of a step is done in `poll`, by the calling thread and torch's own."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Matrix],
        weight_format: str,
        capacity: Capacity,
        progress: Progress,
    ) -> None:
        self.capacity = capacity
        page_size, n_slots, max_len = capacity.page_size_tokens, capacity.max_slots, capacity.max_model_len_tokens
        with torch.inference_mode():
            self._model = CpuModel(config, weights, weight_format, capacity.n_pages, page_size, progress)
        kv = self._model.cache.data
        self.info = DeviceInfo(
            backend="cpu",
            device=f"CPU, {torch.get_num_threads()} threads, {weight_format} weights",
            model=f"{family(config).hf_architecture} {_millions(config)}M",
            weight_bytes=self._model.weight_bytes,
            kv_bytes=kv.nbytes,
        )
        self._slots = SlotTable(n_slots, page_size, capacity.n_pages, max_len)
        self._batches = BatchMaker(n_slots, -(-max_len // page_size), page_size, config.sliding_window, kv.dtype)
        self._sampler = Sampler()
        self._token_bytes = kv.nbytes // (capacity.n_pages * page_size)
        self._bytes_streamed = 0
        self._warm_up()
        self._runner = PlanRunner(capacity, self._slots, self._run_rows)
        self._closed = False

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises RuntimeFault if it breaks the contract of plans."""
        self._check_open()
        self._runner.submit(plan)

    def poll(self, timeout_s: float) -> Sequence[StepResult]:
        """Do one step, however long it takes, and return what it gave. Nothing at once when no plan is unfinished:
        there is no other thread that could bring one within `timeout_s`. Raises RuntimeFault.
        """
        del timeout_s
        self._check_open()
        try:
            with torch.inference_mode():
                return self._runner.step()
        except (RuntimeError, IndexError, MemoryError) as error:  # torch's own
            raise RuntimeFault(f"a step failed: {error}") from error

    def telemetry(self) -> Telemetry:
        """Return counters: a processor computes or waits for the host."""
        return self._runner.telemetry(self._bytes_streamed)

    def close(self) -> None:
        """Give weights and cache back."""
        if not self._closed:
            self._closed = True
            del self._model

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeFault("the runtime is closed")

    def _run_rows(self, segments: Sequence[Segment]) -> list[Choice]:
        """Run one step over `segments`; return choices in their order."""
        batch = self._batches.make(segments)
        logits = self._model(batch)
        sampling = [segment.slot for segment in batch.segments if segment.samples]
        choices = self._sampler.sample(logits, sampling) if sampling else []
        chosen = dict(zip((slot.index for slot in sampling), choices, strict=True))
        for segment in batch.segments:
            choice = chosen.get(segment.slot.index)
            self._slots.advance(segment, None if choice is None else choice.token)
        self._bytes_streamed += self._model.weight_bytes + batch.kv_tokens * self._token_bytes
        return [chosen[segment.slot.index] for segment in segments if segment.samples]

    def _warm_up(self) -> None:
        """Run a whole chunk and one row, so that the first request does not pay for what libraries build lazily.

        Writes to the first pages, which nobody owns yet: pages are always written before they are read.
        """
        c = self.capacity
        n_tokens = min(c.max_step_tokens, c.max_model_len_tokens - 1, c.n_pages * c.page_size_tokens - 1)
        pages = list(range(-(-(n_tokens + 1) // c.page_size_tokens)))
        slot = Slot(0, [0] * (n_tokens + 1), n_tokens + 1, SamplingParams(temperature=0.0), 0, pages)
        with torch.inference_mode():
            for start, count in ((0, n_tokens), (n_tokens, 1)):
                logits = self._model(self._batches.make([Segment(slot, start, count, samples=True)]))
                self._sampler.sample(logits, [slot])


def _millions(config: ModelConfig) -> int:
    """Return the number of parameters in millions, rounded."""
    sizes = config.weight_shapes().values()
    return round(sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in sizes) / 1e6)
