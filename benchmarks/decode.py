"""Decode steps of the megakernel, of CUDA graphs and of uncaptured kernels, in one process, taking turns (A B C C B A).

Times are the device's: from one step's end to the next's, sampling included, while the host keeps up. Medians with 95 %
intervals (bootstrap over rounds). Beside them the time that reading weights and KV takes at the fastest rate that this
process has read memory with. Where the megakernel does not win, the table says so. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from decode_driver import MAX_STEP_TOKENS, PAGE, SAMPLING, Driver, Samples, device_weights, load, read_ceiling
from shapes import SHAPES

from megakernel_runtime.interface import Capacity
from megakernel_runtime.models.config import ModelConfig

GPU_BACKENDS = ("megakernel", "graphs", "eager")
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """One backend in one cell. Times in microseconds."""

    backend: str
    batch: int
    context: int
    median: float
    low: float  # of the 95 % interval of the median
    high: float
    ratio: float  # of the baseline's median to this one: above 1, this one is faster
    floor_share: float  # time to read the bytes at the ceiling's rate, over the median
    idle: float
    states: dict[str, float]  # share of each state
    launches_avoided: float  # a step
    tokens_per_s: float


def interval(rounds: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median of rounds."""
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(rounds, k=len(rounds))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]


def step_bytes(config: ModelConfig, batch: int, context: int, element_bytes: int = 2) -> int:
    """Return what a step must read: all matrices once, and keys and values of every row's context."""
    shapes = config.weight_shapes()
    read = {name: shape for name, shape in shapes.items() if name != "embed" or config.tied_embeddings}
    weights = sum(math.prod(shape) for shape in read.values())
    seen = min(context, config.sliding_window or context)
    return (weights + batch * seen * config.n_layers * 2 * config.kv_size) * element_bytes


def row_of(samples: Samples, backend: str, batch: int, context: int, floor_us: float, baseline_us: float) -> Row:
    """Return what a cell's samples say."""
    median = statistics.median(samples.periods)
    low, high = interval(samples.rounds)
    total = max(sum(samples.states.values()), 1.0)
    return Row(
        backend,
        batch,
        context,
        median,
        low,
        high,
        ratio=baseline_us / median,
        floor_share=floor_us / median,
        idle=statistics.median(samples.idle),
        states={state.removesuffix("_ns"): ns / total for state, ns in samples.states.items()},
        launches_avoided=samples.launches_avoided / max(samples.steps, 1),
        tokens_per_s=batch / median * 1e6,
    )


def measure(options: argparse.Namespace, config: ModelConfig) -> tuple[list[Row], list[dict[str, object]], float]:
    """Return all rows, the prompts, and the read ceiling in bytes per second."""
    device = "cpu" if options.backends == ["host"] else "cuda"
    longest = max(*options.contexts, *options.prompts) + (options.leases + 3) * options.lease_steps
    per_slot = -(-longest // PAGE)
    slots = max(options.batches)
    step_tokens = max(min(MAX_STEP_TOKENS, options.max_step_tokens), slots)
    capacity = Capacity(slots, slots * per_slot, PAGE, per_slot * PAGE, step_tokens, 32, 2, config.vocab_size)
    weights = device_weights(config, device)
    ceiling = read_ceiling(device, options.ceiling_bytes)
    drivers = {name: Driver(load(name, config, weights, capacity), options.lease_steps) for name in options.backends}
    rows: list[Row] = []
    for batch in options.batches:
        for context in options.contexts:
            rows += _cell(drivers, options, batch, context, step_bytes(config, batch, context) / ceiling * 1e6)
            print(*(f"{r.backend} b{batch} ctx {context}: {r.median:.1f} us" for r in rows[-len(drivers) :]),
                  sep="; ", file=sys.stderr)  # fmt: skip
    ceiling = max(ceiling, read_ceiling(device, options.ceiling_bytes))
    prompts: list[dict[str, object]] = [
        {"backend": name, "tokens": tokens, "ms": driver.prompt(tokens, options.rounds)}
        for name, driver in drivers.items()
        for tokens in options.prompts
    ]
    for driver in drivers.values():
        driver.runtime.close()
    return rows, prompts, ceiling


def _cell(
    drivers: dict[str, Driver], options: argparse.Namespace, batch: int, context: int, floor_us: float
) -> list[Row]:
    samples = {name: Samples() for name in drivers}
    for turn in range(options.rounds):
        for name in list(drivers) if turn % 2 == 0 else reversed(drivers):
            drivers[name].decode(samples[name], options.sampling, batch, context, options.leases)
    baseline = "graphs" if "graphs" in samples else next(iter(samples))
    baseline_us = statistics.median(samples[baseline].periods)
    return [row_of(s, name, batch, context, floor_us, baseline_us) for name, s in samples.items()]


def costs(rows: Sequence[Row], per_hour: float, users: int, target_ms: float) -> list[str]:
    """Return what a million tokens costs in each cell's best backend, and how many GPUs `users` streams need."""
    lines: list[str] = []
    cells = sorted({(row.batch, row.context) for row in rows})
    for batch, context in cells:
        best = min((r for r in rows if (r.batch, r.context) == (batch, context)), key=lambda r: r.median)
        per_million = per_hour / (best.tokens_per_s * 3600) * 1e6
        lines.append(f"batch {batch}, context {context}: {per_million:.4f} a million tokens ({best.backend})")
    for context in sorted({context for _, context in cells}):
        fit = [r for r in rows if r.context == context and r.median <= target_ms * 1e3]
        if not fit:
            lines.append(f"context {context}: no measured batch keeps {target_ms} ms a token")
            continue
        most = max(r.batch for r in fit)
        lines.append(
            f"context {context}: {users} users at {target_ms} ms a token or better need {-(-users // most)} GPUs, "
            f"{most} users on each (the largest measured batch that keeps it)"
        )
    return lines


def show(rows: Sequence[Row], prompts: Sequence[dict[str, object]], ceiling: float) -> None:
    """Print the tables."""
    print(f"read ceiling {ceiling / 1e9:.0f} GB/s, the fastest reduction in this process\n")
    print(f"{'batch':>5} {'context':>7} {'backend':>11} {'us/step':>9} {'95 % of median':>17} {'x graphs':>9} "
          f"{'of ceiling':>10} {'idle':>6} {'tokens/s':>9} {'launches avoided':>17}")  # fmt: skip
    for r in rows:
        print(f"{r.batch:5} {r.context:7} {r.backend:>11} {r.median:9.1f} {r.low:8.1f}-{r.high:<8.1f} {r.ratio:9.2f} "
              f"{r.floor_share:10.2f} {r.idle:6.1%} {r.tokens_per_s:9.0f} {r.launches_avoided:17.0f}")  # fmt: skip
    losses = [r for r in rows if r.backend == "megakernel" and r.ratio < 1.0]
    for r in losses:
        print(f"\nThe megakernel loses at batch {r.batch}, context {r.context}: {r.ratio:.2f} times graphs' speed.")
    for p in prompts:
        print(f"prompt of {p['tokens']} tokens, {p['backend']}: {p['ms']:.2f} ms to its first token")


def arguments() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama-3.2-1b", help="shape; weights are random")
    parser.add_argument("--backends", nargs="+", choices=(*GPU_BACKENDS, "host"), default=list(GPU_BACKENDS))
    parser.add_argument("--sampling", choices=SAMPLING, default="greedy")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="rows of a decode step")
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 2048], help="tokens at the first step")
    parser.add_argument("--prompts", nargs="*", type=int, default=[], help="prompts to time, in tokens")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each backend in each cell")
    parser.add_argument("--leases", type=int, default=2, help="plans measured in a turn, about half of each is run")
    parser.add_argument("--lease-steps", type=int, default=32)
    parser.add_argument("--max-step-tokens", type=int, default=MAX_STEP_TOKENS)
    parser.add_argument("--ceiling-bytes", type=int, default=1 << 32, help="read to find the ceiling")
    parser.add_argument("--gpu-hour-cost", type=float, help="then costs are printed, in the same unit")
    parser.add_argument("--users", type=int, default=1000, help="concurrent streams, for the number of GPUs")
    parser.add_argument("--target-ms", type=float, default=10.0, help="latency a token that they are to have")
    parser.add_argument("--plot", type=Path, help="write a PNG (needs matplotlib)")
    return parser


def main() -> None:
    """Measure and print."""
    options = arguments().parse_args()
    if "host" in options.backends and options.backends != ["host"]:
        sys.exit("host is measured alone: it is not on the GPU that the others share")
    rows, prompts, ceiling = measure(options, SHAPES[options.model])
    show(rows, prompts, ceiling)
    if options.gpu_hour_cost is not None:
        print(*costs(rows, options.gpu_hour_cost, options.users, options.target_ms), sep="\n")
    if options.plot is not None:
        from decode_plot import plot

        plot(rows, options.model, options.plot)
    name = "CPU" if options.backends == ["host"] else torch.cuda.get_device_name()
    told = {"benchmark": "decode", "device": name, "torch": torch.__version__, "ceiling_bytes_per_s": ceiling}
    asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    cells = [{field: getattr(row, field) for field in Row.__dataclass_fields__} for row in rows]
    print(json.dumps(told | {"options": asked, "rows": cells, "prompts": prompts}))


if __name__ == "__main__":
    main()
