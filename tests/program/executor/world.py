"""What all threads of a run share: the artefacts, weights as they come off the tape, memory and the payload of cells.

Must not know: how instructions run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from megakernel_runtime.kernels.shape import KernelShape
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import ROW_TILE, TILE_COLUMNS, Placement, place, row_chunks
from megakernel_runtime.program.reference.rope import inverse_frequencies
from megakernel_runtime.program.validate import Image
from megakernel_runtime.resident.layout import code_of
from megakernel_runtime.resident.tape import Tape, pack_tape, untile_matrix
from tests.program.executor.memory import EMPTY, Indices, Memory
from tests.program.executor.numbers import F32, U32, Partial
from tests.program.executor.rules import Rules

HEADS_DONE, SAMPLERS_DONE, PUBLISHED, PLANS_WRITTEN, PLANS_TAKEN, STEPS_REPORTED = range(6)
RING = 3  # plan records
RESULTS = 64  # steps in the rings of results
DEPTH = 96  # writes of one word in a run


class Slot(enum.IntEnum):
    """Fields of a slot. SEQUENCE is a ghost: whose tokens they are, for judging only."""

    TOKEN = 0
    POSITION = 1
    GENERATED = 2
    LIMIT = 3
    LIVE = 4
    ROOM = 5
    SEQUENCE = 6


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill row: `token` at `position` of a slot, whose segment begins at row `first` of the step."""

    slot: int
    position: int
    first: int
    token: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What the host writes: changes of slot fields and page tables, then rows for at most `lease` steps."""

    decode: tuple[int, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    lease: int = 1
    fields: dict[int, dict[Slot, int]] = field(default_factory=dict[int, dict[Slot, int]])
    pages: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    quits: bool = False
    waits: bool = False  # the host writes it only when it has seen a step of the plan before

    @property
    def n_rows(self) -> int:
        """Rows of its first step."""
        return len(self.decode) + len(self.prefill)

    @property
    def changes(self) -> bool:
        """Whether it writes anything."""
        return bool(self.fields or self.pages)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that was sampled, and from what."""

    sequence: int
    position: int
    token: int
    logits: F32


class World:
    """One model on one grid. `reset` makes it ready for another run."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        shape: KernelShape,
        placement: Placement | None = None,
    ) -> None:
        self.config, self.shape, self.rules = config, shape, Rules()
        placement = placement or place(config, shape.grid)
        rounded = {name: weight.bfloat16() for name, weight in weights.items()}
        tape = pack_tape(config, rounded, placement, torch.device("cpu"))
        meta, code = code_of(shape, placement, tape.starts, tape.counts)
        tiles = len(tape.tiles) // 8
        self.image = Image(config, shape, placement, meta, code, tape.starts, tape.counts, tiles, shape.grid)
        small = {name: weight for name, weight in rounded.items() if weight.ndim == 1 or name == "embed"}
        self.small = {name: weight.float().numpy() for name, weight in small.items()}
        self.matrices = _off_the_tape(self.image, tape)
        positions = np.arange(shape.max_len)[:, None] * inverse_frequencies(config).numpy()
        self.cos, self.sin = np.cos(positions).astype(np.float32), np.sin(positions).astype(np.float32)
        # results of pure arithmetic by operands, for all runs
        self.memo: dict[tuple[int, int, int, int, bytes], tuple[F32, U32]] = {}
        self.attended: dict[tuple[bytes, bytes, bytes], Partial] = {}
        self.staged: dict[tuple[int, int, bytes], tuple[F32, F32, F32]] = {}
        self.raw_words: dict[tuple[int, int, int], Indices] = {}
        self._lay_out_words()
        self._lay_out_cells()
        self.reset(0, Rules())

    def _lay_out_words(self) -> None:
        shape = self.shape
        self.step_words = shape.step_elements // 2
        self.unit_words = shape.group * (shape.head_dim + 2)
        self.partials_at = 2 * self.step_words
        self.n_words = self.partials_at + shape.max_units * self.unit_words

    def _lay_out_cells(self) -> None:
        """Number the cells: KV by (layer, page, head, token), and the rest."""
        shape = self.shape
        sizes = {
            "kv": shape.layers * shape.n_pages * shape.n_kv_heads * shape.page,
            "resid": shape.hidden // ROW_TILE,
            "fields": shape.slots,
            "pages": shape.slots,
            "best": shape.grid,
            "cmd": 2,
            "records": RING,
            "tokens": RESULTS * shape.rows,
        }
        self.cell: dict[str, int] = {}
        n = 0
        for name, size in sizes.items():
            self.cell[name] = n
            n += size
        initial = np.full(self.n_words, EMPTY, dtype=np.uint64)
        initial[self.partials_at :] |= np.uint64(EMPTY << 32)  # no step has this mark
        self.memory = Memory(initial, n, 6, shape.grid + 1, DEPTH)

    def reset(self, seed: int, rules: Rules) -> None:
        """Make memory as at a launch."""
        shape = self.shape
        self.rules = rules
        self.memory.reset(seed)
        self.kv = np.zeros((shape.layers, shape.n_pages, shape.n_kv_heads, shape.page, 2, shape.head_dim), np.float32)
        self.resid = np.zeros((shape.rows, shape.hidden), np.float32)
        self.fields = np.zeros((shape.slots, len(Slot)), np.int64)
        self.pages = np.zeros((shape.slots, shape.max_pages), np.int64)
        self.best = np.zeros((shape.grid, shape.rows, 2))
        self.logits = np.zeros((shape.rows, shape.vocab), np.float32)
        self.cmd: list[Plan] = [Plan(), Plan()]
        self.records: list[Plan] = [Plan()] * RING
        self.tokens: dict[int, tuple[int, int]] = {}  # by cell: slot, token
        self.sampled: list[Sampled] = []  # ghost
        self.reported: list[tuple[int, int]] = []  # by the host: slot, token
        self.seen: set[str] = set()  # ghost: what happened that a proof should cover

    def kv_cells(self, layer: int, page: NDArray[np.int64] | int, head: int, token: NDArray[np.int64] | int) -> Indices:
        """Cells of keys and values."""
        shape = self.shape
        return self.cell["kv"] + ((layer * shape.n_pages + page) * shape.n_kv_heads + head) * shape.page + token


def _off_the_tape(image: Image, tape: Tape) -> dict[tuple[int, int, int], NDArray[np.float64]]:
    """Return the rows of each (CTA, opcode, layer), as the tape run brings them: the ring hands out in that order."""
    tiles = tape.tiles.view(-1, 8, ROW_TILE, 64)
    found: dict[tuple[int, int, int], NDArray[np.float64]] = {}
    for cta, (start, n, first, n_code) in enumerate(image.meta):
        at = start
        for words in image.code[first : first + n_code]:
            op, count, columns = Op(words[0]), words[3], words[6]
            chunks = -(-columns // TILE_COLUMNS) if row_chunks(image.config, op) else 0
            if chunks:
                run = tiles[at : at + count * chunks].view(count, chunks, 8, ROW_TILE, 64)
                found[cta, op, words[1]] = untile_matrix(run, count * ROW_TILE, columns).double().numpy()
                at += count * chunks
        assert at == start + n, f"CTA {cta} takes another number of tiles than its run has"
    return found
