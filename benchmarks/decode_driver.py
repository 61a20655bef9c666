"""Drives runtimes for benchmarks/decode.py as the scheduler does, and measures their steps by the device's clock.

Random weights of a model's shape; contexts are pages of zeros, so that none has to be computed first. Must not know:
tables, plots, arguments.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megakernel_runtime.backends.graphs.load import cuda_device, host_device, make_runtime
from megakernel_runtime.interface import (
    Capacity,
    PrefillRow,
    Runtime,
    RuntimeSpec,
    SamplingParams,
    SlotAdmit,
    StepPlan,
    StepResult,
    Telemetry,
)
from megakernel_runtime.models.config import ModelConfig

PAGE = 32
MAX_STEP_TOKENS = 2048
_FOREVER = 1_000_000
_AT_ONCE_MS = 1  # the resident kernel leaves the GPU so soon when another backend's turn has come

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=_FOREVER),
    "temperature": SamplingParams(temperature=0.8, max_tokens=_FOREVER, seed=1),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.95, top_k=50, max_tokens=_FOREVER, seed=1),
    "full": SamplingParams(
        temperature=0.8, top_p=0.95, frequency_penalty=0.3, top_logprobs=5, max_tokens=_FOREVER, seed=1
    ),
}


@dataclass(slots=True)
class Samples:
    """What was measured of one backend in one cell, all rounds together. Times in microseconds."""

    periods: list[float] = field(default_factory=list[float])  # from one step's end to the next's
    rounds: list[float] = field(default_factory=list[float])  # median period of each round
    idle: list[float] = field(default_factory=list[float])  # share of the time on the device that was no computing
    states: dict[str, float] = field(default_factory=dict[str, float])  # nanoseconds by state, all rounds
    launches_avoided: int = 0
    steps: int = 0


def device_weights(config: ModelConfig, device: str) -> dict[str, torch.Tensor]:
    """Return random bf16 weights, born on the device: the values do not matter, but they must not overflow."""
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in config.weight_shapes().items():
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        weights[name] = values.mul_(shape[1] ** -0.5) if len(shape) > 1 else values.mul_(0.1).add_(1.0)
    return weights


def load(backend: str, config: ModelConfig, weights: Mapping[str, torch.Tensor], capacity: Capacity) -> Runtime:
    """Return a runtime: megakernel, graphs or eager on the GPU, or "host", the eager operations in torch on the CPU."""
    if backend == "host":
        return make_runtime(host_device(), config, weights, capacity, torch.float32, _unwatched, captures=False)
    device = cuda_device(backend)
    if backend == "megakernel":
        from megakernel_runtime.backends.megakernel.load import make_megakernel

        spec = RuntimeSpec(backend, "", idle_park_ms=_AT_ONCE_MS)
        return make_megakernel(device, config, weights, capacity, _unwatched, spec)
    captures = backend == "graphs"
    return make_runtime(device, config, weights, capacity, torch.bfloat16, _unwatched, captures=captures)


class Driver:
    """One runtime: the next plan is there before the last one ends."""

    def __init__(self, runtime: Runtime, lease_steps: int) -> None:
        self.runtime = runtime
        self._lease_steps = min(lease_steps, runtime.capacity.max_lease_steps)
        self._pages_each = runtime.capacity.n_pages // runtime.capacity.max_slots
        self._plan_id = 0

    def decode(self, into: Samples, sampling: str, batch: int, context: int, leases: int) -> None:
        """Measure steps of `batch` rows whose contexts begin at `context` tokens; add them to `into`."""
        slots = tuple(range(batch))
        for slot in slots:
            self.admit(slot, context, (context - 1) // PAGE * PAGE, SAMPLING[sampling])
        self._lease(slots, 1)  # warm
        before = self.runtime.telemetry()
        results = self._lease(slots, leases)
        after = self.runtime.telemetry()
        self._run(StepPlan(self._next(), releases=slots))
        ends = [result.ended_ns for result in results]
        periods = [(b - a) / 1e3 for a, b in itertools.pairwise(ends)]
        into.periods += periods
        into.rounds.append(statistics.median(periods))
        _account(into, before, after)

    def prompt(self, tokens: int, repeats: int) -> float:
        """Return the median milliseconds from a prompt's submission to its first token, in an idle runtime."""
        took_ms: list[float] = []
        for _ in range(repeats + 1):
            began = time.monotonic_ns()
            self.admit(0, tokens, 0, SAMPLING["greedy"])
            took_ms.append((time.monotonic_ns() - began) / 1e6)
            self._run(StepPlan(self._next(), releases=(0,)))
        return statistics.median(took_ms[1:])

    def admit(self, slot: int, length: int, cached: int, sampling: SamplingParams) -> None:
        """Put a sequence into a slot; `cached` of its `length` tokens are taken as computed, the rest is computed."""
        pages = tuple(range(slot * self._pages_each, (slot + 1) * self._pages_each))
        vocab = self.runtime.capacity.vocab_size
        tokens = tuple((slot * 31 + i * 7) % vocab for i in range(length))
        admits = (SlotAdmit(slot, tokens, length, sampling, cached, pages),)
        chunk = self.runtime.capacity.max_step_tokens
        for start in range(cached, length, chunk):
            rows = (PrefillRow(slot, start, min(chunk, length - start)),)
            self._run(StepPlan(self._next(), admits=admits, prefill=rows))
            admits = ()

    def _lease(self, slots: Sequence[int], n: int) -> list[StepResult]:
        """Run about n leases of steps without a gap between plans; return their results that have rows."""
        results: list[StepResult] = []
        plan = self._decode_plan(slots)
        for _ in range(n):
            while not any(r.plan_id == plan and (r.last or r.step_index >= self._lease_steps // 2) for r in results):
                results += self.runtime.poll(1.0)
            plan = self._decode_plan(slots)
        results += self._finish()
        return [result for result in results if result.n_rows]

    def _decode_plan(self, slots: Sequence[int]) -> int:
        self.runtime.submit(StepPlan(self._next(), decode=tuple(slots), lease_steps=self._lease_steps))
        return self._plan_id

    def _run(self, plan: StepPlan) -> None:
        self.runtime.submit(plan)
        self._finish()

    def _finish(self) -> list[StepResult]:
        results: list[StepResult] = []
        while not any(result.last and result.plan_id == self._plan_id for result in results):
            results += self.runtime.poll(1.0)
        return results

    def _next(self) -> int:
        self._plan_id += 1
        return self._plan_id


def read_ceiling(device: str, n_bytes: int, repeats: int = 20) -> float:
    """Return the fastest that a reduction in torch has read memory, in bytes per second."""
    values = torch.zeros(n_bytes // 4, dtype=torch.int32, device=device)
    best_s = float("inf")
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        values.amax().item()
        best_s = min(best_s, time.perf_counter() - began)
    return n_bytes / best_s


def _account(into: Samples, before: Telemetry, after: Telemetry) -> None:
    states = ("compute_ns", "wait_dependency_ns", "wait_memory_ns", "wait_host_ns")
    spent = {state: getattr(after, state) - getattr(before, state) for state in states}
    for state, ns in spent.items():
        into.states[state] = into.states.get(state, 0.0) + ns
    into.idle.append(1.0 - spent["compute_ns"] / max(sum(spent.values()), 1))
    into.launches_avoided += after.kernels_avoided - before.kernels_avoided
    into.steps += sum(after.steps.values()) - sum(before.steps.values())


def _unwatched(phase: str, done: int, total: int) -> None:
    """Nobody watches the load."""
    del phase, done, total
