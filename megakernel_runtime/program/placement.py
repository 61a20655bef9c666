"""Which CTA does which rows of which matrix: a program's work, split over any number of SMs. Standard library only.

Rows go in tiles of 16. Within one instruction a CTA has one run of neighbouring tiles; over a step every CTA gets
bytes in proportion to its rate. The residual stream lives with its owner: EMBED, OUT and DOWN of all layers share one
split, so that no CTA ever reads another's fp32 residual. Must not know: tensors, batches, device code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.isa import Op

ROW_TILE = 16
TILE_COLUMNS = 512
# How many row tiles an instruction's part may be from the CTA's share, to make up for other instructions. Little where
# all CTAs soon wait for the slowest; the LM head evens out what is left.
SLACK = {Op.QKV: 0.5, Op.GATE_UP: 0.5, Op.LM_HEAD: 4.0}


@dataclass(frozen=True, slots=True)
class Task:
    """One CTA's part of one instruction: `count` row tiles from `first`. Instructions without rows have count 0."""

    op: Op
    layer: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Per CTA its tasks in program order. Every CTA has a task for every instruction that all CTAs take part in."""

    grid: int
    tasks: tuple[tuple[Task, ...], ...]

    def tiles(self, config: ModelConfig, cta: int) -> int:
        """Return how many tiles of weights a CTA streams in one step."""
        return sum(task.count * row_chunks(config, task.op) for task in self.tasks[cta])


def padded(columns: int) -> int:
    """Return the width of an activation on the device: a multiple of 64, so that no word of it crosses into another."""
    return -(-columns // 64) * 64


def columns_of(config: ModelConfig, op: Op) -> int:
    """Return the columns of the matrix of `op`; 0 for instructions without one."""
    return {
        Op.QKV: config.hidden_size,
        Op.OUT: config.q_size,
        Op.GATE_UP: config.hidden_size,
        Op.DOWN: config.ffn_size,
        Op.LM_HEAD: config.hidden_size,
    }.get(op, 0)


def rows_of(config: ModelConfig, op: Op) -> int:
    """Return the rows of the matrix of `op`; 0 for instructions without one."""
    return {
        Op.QKV: config.q_size + 2 * config.kv_size,
        Op.OUT: config.hidden_size,
        Op.GATE_UP: 2 * padded(config.ffn_size),
        Op.DOWN: config.hidden_size,
        Op.LM_HEAD: config.vocab_size,
    }.get(op, 0)


def row_chunks(config: ModelConfig, op: Op) -> int:
    """Return how many ring tiles one row tile of `op` takes."""
    return -(-columns_of(config, op) // TILE_COLUMNS)


def place(config: ModelConfig, grid: int, rates: Sequence[float] | None = None) -> Placement:
    """Split the program of `config` over `grid` CTAs. `rates`: relative streaming speed of each, default equal."""
    shares = [1.0 / grid] * grid if rates is None else [rate / sum(rates) for rate in rates]
    balance = _Balance(shares)
    owner = balance.split(rows_of(config, Op.OUT), row_chunks(config, Op.OUT) + row_chunks(config, Op.DOWN))
    for _ in range(config.n_layers - 1):
        balance.add(owner, row_chunks(config, Op.OUT) + row_chunks(config, Op.DOWN))
    tasks: list[list[Task]] = [[Task(Op.EMBED, 0, *run)] for run in owner]
    for layer in range(config.n_layers):
        gate_up = balance.split(rows_of(config, Op.GATE_UP), row_chunks(config, Op.GATE_UP), SLACK[Op.GATE_UP])
        qkv = balance.split(rows_of(config, Op.QKV), row_chunks(config, Op.QKV), SLACK[Op.QKV])
        for cta in range(grid):
            tasks[cta] += (
                Task(Op.QKV, layer, *qkv[cta]),
                Task(Op.ATTEND, layer, 0, 0),
                Task(Op.OUT, layer, *owner[cta]),
                Task(Op.GATE_UP, layer, *gate_up[cta]),
                Task(Op.DOWN, layer, *owner[cta]),
            )
    head = balance.split(rows_of(config, Op.LM_HEAD), row_chunks(config, Op.LM_HEAD), SLACK[Op.LM_HEAD])
    for cta in range(grid):
        tasks[cta] += (Task(Op.LM_HEAD, config.n_layers, *head[cta]), Task(Op.SAMPLE, 0, 0, 0))
    return Placement(grid, tuple(tuple(own) for own in tasks))


class _Balance:
    """Bytes given to each CTA so far, against its share."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._given = [0.0] * len(shares)
        self._total = 0.0

    def split(self, rows: int, chunks: int, slack: float = 0.0) -> list[tuple[int, int]]:
        """Return (first, count) row tiles of each CTA: near its share, more to who is behind."""
        n = -(-rows // ROW_TILE)
        self._total += n * chunks
        wanted: list[float] = []
        for share, given in zip(self._shares, self._given, strict=True):
            behind = (self._total * share - given) / chunks
            wanted.append(min(max(behind, n * share - slack, 0.0), n * share + slack))
        counts = [int(want) for want in wanted]
        left = n - sum(counts)
        step = 1 if left > 0 else -1
        while left:  # whoever is furthest from its wish moves first
            able = [c for c in range(len(counts)) if counts[c] + step >= 0]
            chosen = sorted(able, key=lambda c: step * (counts[c] - wanted[c]))[: abs(left)]
            for cta in chosen:
                counts[cta] += step
            left -= step * len(chosen)
        runs: list[tuple[int, int]] = []
        first = 0
        for count in counts:
            runs.append((first, count))
            first += count
        for cta, count in enumerate(counts):
            self._given[cta] += count * chunks
        return runs

    def add(self, runs: Sequence[tuple[int, int]], chunks: int) -> None:
        """Account for another instruction with a split that is already made."""
        for cta, (_, count) in enumerate(runs):
            self._given[cta] += count * chunks
            self._total += count * chunks
