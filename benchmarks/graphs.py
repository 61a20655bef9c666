"""Decode steps and prompts on a GPU: the graphs backend, and eager beside it, with random weights of a model's shape.

Times are the GPU's, from events around steps: `step` is one step alone, `period` the time from one step's end to the
next's, what a token costs while the host keeps up. Contexts grow by the steps that are measured. Prints a table and one
JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from shapes import SHAPES

from megakernel_runtime.backends.graphs.load import cuda_device, make_runtime
from megakernel_runtime.backends.graphs.runtime import GraphsRuntime
from megakernel_runtime.interface import Capacity, PrefillRow, SamplingParams, SlotAdmit, StepPlan, StepResult
from megakernel_runtime.models.config import ModelConfig

PAGE = 32
LEASE = 32
MAX_STEP_TOKENS = 2048
_FOREVER = 1_000_000

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=_FOREVER),
    "temperature": SamplingParams(temperature=0.8, max_tokens=_FOREVER, seed=1),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.95, top_k=50, max_tokens=_FOREVER, seed=1),
    "full": SamplingParams(
        temperature=0.8, top_p=0.95, frequency_penalty=0.3, top_logprobs=5, max_tokens=_FOREVER, seed=1
    ),
}


@dataclass(frozen=True, slots=True)
class Decode:
    """One measured kind of decode step. Times in milliseconds, medians."""

    model: str
    backend: str
    sampling: str
    batch: int
    context: int
    step_ms: float
    period_ms: float
    tokens_per_s: float
    kernels: float  # of one step, where it is captured
    gb_per_s: float  # weights and KV
    waiting: float  # share of the time that the GPU waited for the host


@dataclass(frozen=True, slots=True)
class Prompt:
    """One measured prompt length. Times in milliseconds, medians."""

    model: str
    backend: str
    tokens: int
    device_ms: float
    host_ms: float  # from the plan's submission to its result


def device_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return random bf16 weights, born on the GPU: the values do not matter, but they must not overflow."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in config.weight_shapes().items():
        values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        weights[name] = values.mul_(shape[1] ** -0.5) if len(shape) > 1 else values.mul_(0.1).add_(1.0)
    return weights


def unwatched(phase: str, done: int, total: int) -> None:
    """Nobody watches the load."""
    del phase, done, total


class Bench:
    """One runtime, driven as the scheduler drives it: the next plan is there before the last one ends."""

    def __init__(self, model: str, backend: str, max_batch: int, max_context: int, n_leases: int) -> None:
        config = SHAPES[model]
        self._names = (model, backend)
        self._per_slot = -(-(max_context + (n_leases + 4) * LEASE) // PAGE)
        max_len = self._per_slot * PAGE
        capacity = Capacity(
            max_batch, max_batch * self._per_slot, PAGE, max_len, MAX_STEP_TOKENS, LEASE, 2, config.vocab_size
        )
        self._plan_id = 0
        self.runtime: GraphsRuntime = make_runtime(
            cuda_device(backend),
            config,
            device_weights(config),
            capacity,
            torch.bfloat16,
            unwatched,
            captures=backend == "graphs",
        )

    def decode(self, sampling: str, batch: int, context: int, n_leases: int) -> Decode:
        """Measure steps of `batch` rows whose contexts begin at `context` tokens; what is cached of them is zeros."""
        slots = tuple(range(batch))
        cached = (context - 1) // PAGE * PAGE
        for slot in slots:
            self._admit(slot, context, cached, SAMPLING[sampling])
        self._lease(slots, 1)  # warm
        before = self.runtime.telemetry()
        results = self._lease(slots, n_leases)
        after = self.runtime.telemetry()
        self._run(StepPlan(self._next(), releases=slots))
        ends = [r.ended_ns for r in results]
        period_ns = statistics.median(b - a for a, b in itertools.pairwise(ends))
        steps = sum(after.steps.values()) - sum(before.steps.values())
        busy_ns = after.compute_ns - before.compute_ns
        waited_ns = after.wait_host_ns - before.wait_host_ns
        return Decode(
            *self._names,
            sampling,
            batch,
            context,
            step_ms=statistics.median(r.ended_ns - r.started_ns for r in results) / 1e6,
            period_ms=period_ns / 1e6,
            tokens_per_s=batch / period_ns * 1e9,
            kernels=(sum(after.launches.values()) - sum(before.launches.values())) / steps,
            gb_per_s=(after.bytes_streamed - before.bytes_streamed) / busy_ns,
            waiting=waited_ns / (waited_ns + busy_ns),
        )

    def prompt(self, tokens: int, repeats: int) -> Prompt:
        """Measure a prompt in an idle runtime, in as few steps as it takes."""
        device_ms: list[float] = []
        host_ms: list[float] = []
        for _ in range(repeats + 1):
            began = time.monotonic_ns()
            results = self._admit(0, tokens, 0, SAMPLING["greedy"])
            host_ms.append((time.monotonic_ns() - began) / 1e6)
            device_ms.append(sum(r.ended_ns - r.started_ns for r in results) / 1e6)
            self._run(StepPlan(self._next(), releases=(0,)))
        return Prompt(*self._names, tokens, statistics.median(device_ms[1:]), statistics.median(host_ms[1:]))

    def _admit(self, slot: int, length: int, cached: int, sampling: SamplingParams) -> list[StepResult]:
        pages = tuple(range(slot * self._per_slot, (slot + 1) * self._per_slot))
        tokens = tuple((slot * 31 + i * 7) % 40_000 for i in range(length))
        admits = (SlotAdmit(slot, tokens, length, sampling, cached, pages),)
        results: list[StepResult] = []
        for start in range(cached, length, MAX_STEP_TOKENS):
            rows = (PrefillRow(slot, start, min(MAX_STEP_TOKENS, length - start)),)
            results += self._run(StepPlan(self._next(), admits=admits, prefill=rows))
            admits = ()
        return results

    def _lease(self, slots: tuple[int, ...], n: int) -> list[StepResult]:
        """Run about n leases of steps without a gap between plans; return their results that have rows."""
        results: list[StepResult] = []
        self.runtime.submit(StepPlan(self._next(), decode=slots, lease_steps=LEASE))
        for _ in range(n):
            while not any(r.plan_id == self._plan_id and r.step_index >= LEASE // 2 for r in results):
                results += self.runtime.poll(1.0)
            self.runtime.submit(StepPlan(self._next(), decode=slots, lease_steps=LEASE))
        results += self._finish()
        return [r for r in results if r.n_rows]

    def _run(self, plan: StepPlan) -> list[StepResult]:
        self.runtime.submit(plan)
        return self._finish()

    def _finish(self) -> list[StepResult]:
        results: list[StepResult] = []
        while not any(r.last and r.plan_id == self._plan_id for r in results):
            results += self.runtime.poll(1.0)
        return results

    def _next(self) -> int:
        self._plan_id += 1
        return self._plan_id


def measure(options: argparse.Namespace) -> tuple[list[Decode], list[Prompt]]:
    """Return all measurements that were asked for, telling each on stderr as it is made."""
    decodes: list[Decode] = []
    prompts: list[Prompt] = []
    for model in options.models:
        for backend in options.backends:
            longest = max(*options.contexts, *options.prompts)
            bench = Bench(model, backend, max(options.batches), longest, options.leases)
            for sampling in options.sampling:
                for batch in options.batches:
                    for context in options.contexts:
                        decodes.append(bench.decode(sampling, batch, context, options.leases))
                        print(decodes[-1], file=sys.stderr)
            prompts += [bench.prompt(tokens, options.repeats) for tokens in options.prompts]
            bench.runtime.close()
    return decodes, prompts


def show(decodes: Sequence[Decode], prompts: Sequence[Prompt]) -> None:
    """Print both tables."""
    print(f"{'model':14} {'backend':8} {'sampling':12} {'batch':>5} {'context':>7} {'step ms':>8} {'period ms':>9} "
          f"{'tokens/s':>9} {'kernels':>8} {'GB/s':>7} {'waiting':>8}")  # fmt: skip
    for d in decodes:
        print(f"{d.model:14} {d.backend:8} {d.sampling:12} {d.batch:5} {d.context:7} {d.step_ms:8.3f} "
              f"{d.period_ms:9.3f} {d.tokens_per_s:9.0f} {d.kernels:8.1f} {d.gb_per_s:7.0f} "
              f"{d.waiting:8.1%}")  # fmt: skip
    print(f"\n{'model':14} {'backend':8} {'prompt':>7} {'device ms':>10} {'host ms':>9}")
    for p in prompts:
        print(f"{p.model:14} {p.backend:8} {p.tokens:7} {p.device_ms:10.3f} {p.host_ms:9.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The graphs backend's decode steps and prompts on this GPU.")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["llama-3.2-1b"], help="shapes to run")
    parser.add_argument("--backends", nargs="+", choices=("graphs", "eager"), default=["graphs"])
    parser.add_argument("--sampling", nargs="+", choices=SAMPLING, default=["greedy"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16, 64], help="rows of a decode step")
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 2048], help="tokens at the first step")
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 2048], help="tokens of prompts")
    parser.add_argument("--leases", type=int, default=3, help=f"measured leases of {LEASE} steps, half of each is run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of a prompt")
    decodes, prompts = measure(options := parser.parse_args())
    show(decodes, prompts)
    told = {"benchmark": "graphs", "gpu": cuda_device("graphs").name, "torch": torch.__version__}
    rows = {"decode": [asdict(d) for d in decodes], "prompts": [asdict(p) for p in prompts]}
    print(json.dumps(told | {"options": vars(options)} | rows))


if __name__ == "__main__":
    main()
