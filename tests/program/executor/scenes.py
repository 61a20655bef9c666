"""Tiny models, sequences whose right answers the reference interpreter gave, and random scenes of plans for them."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, fields

import numpy as np
import torch

from megakernel_runtime.kernels.shape import KernelShape
from megakernel_runtime.resident.layout import shape_of
from tests.program.executor.numbers import F32
from tests.program.executor.world import Plan, Prefill, Slot, World
from tests.program.images import model
from tests.program.programs import admit, decode, interpreter, prefill

PAGE, MAX_LEN, SLOTS = 4, 32, 4
N_PAGES = 20  # fewer than all slots could need: pages change hands
N_SEQUENCES = 6
CLEAR = 0.08  # between the best and the second best logit, of the largest: tokens do not hang on rounding

MODELS = {
    "llama": model("llama", 64, 2, 4, 2, 16, 80, 61),
    "qwen2": model("qwen2", 64, 2, 2, 1, 32, 64, 50, qkv_bias=True, tied_embeddings=True),
    "qwen3": model("qwen3", 64, 2, 2, 2, 32, 64, 33, qk_norm=True),
    "mistral": model("mistral", 64, 2, 4, 1, 16, 64, 40, sliding_window=11),
}


class TinyShape(KernelShape):
    """Spans of 8 positions, so that short contexts have several."""

    @property
    def span(self) -> int:
        """Positions of an attention span."""
        return 8


@dataclass(frozen=True, slots=True)
class Sequence:
    """A prompt; by position of the last known token the next one and the logits it has."""

    number: int
    prompt: tuple[int, ...]
    tokens: dict[int, int]
    logits: dict[int, F32]


@functools.cache
def weights_of(name: str) -> dict[str, torch.Tensor]:
    """Random weights, rounded to bf16."""
    generator = torch.Generator().manual_seed(1)
    weights: dict[str, torch.Tensor] = {}
    for key, size in MODELS[name].weight_shapes().items():
        noise = torch.randn(size, generator=generator)
        drawn = 1 + 0.2 * noise if "norm" in key else 0.3 * noise if "bias" in key else 0.18 * noise
        weights[key] = drawn.bfloat16().float()
    return weights


def tiny_shape(name: str, grid: int) -> TinyShape:
    """The kernel's numbers for a tiny model."""
    shape = shape_of(MODELS[name], rows=8, grid=grid, slots=SLOTS, n_pages=N_PAGES, max_len=MAX_LEN, page=PAGE)
    return TinyShape(**{field.name: getattr(shape, field.name) for field in fields(shape)})


@functools.cache
def world_of(name: str, grid: int) -> World:
    """A world, made once; runs reset it."""
    return World(MODELS[name], weights_of(name), tiny_shape(name, grid))


@functools.cache
def sequences_of(name: str) -> tuple[Sequence, ...]:
    """Sequences of different lengths whose greedy tokens are clear at every position."""
    found: list[Sequence] = []
    draw = random.Random(7)
    while len(found) < N_SEQUENCES:
        prompt = tuple(draw.randrange(MODELS[name].vocab_size) for _ in range(1 + len(found) * 3))
        sequence = _answer(name, len(found), prompt)
        if sequence:
            found.append(sequence)
    return tuple(found)


def _answer(name: str, number: int, prompt: tuple[int, ...]) -> Sequence | None:
    """Greedy decoding by the reference interpreter, to the last position; None if a choice is close."""
    machine, slots = interpreter(MODELS[name], weights_of(name), page=PAGE, n_pages=16)
    admit(slots, 0, prompt, range(MAX_LEN // PAGE))
    tokens: dict[int, int] = {}
    logits: dict[int, F32] = {}
    for position in range(len(prompt) - 1, len(prompt) + 7):
        segment = prefill(slots, 0, 0, len(prompt)) if not tokens else decode(slots, 0)
        tokens[position] = machine.step([segment])[0].token
        logits[position] = machine.logits[0].numpy()
        second, best = np.sort(logits[position])[-2:]
        if best - second < CLEAR * np.abs(logits[position]).max():
            return None
    return Sequence(number, prompt, tokens, logits)


class Scene:
    """Plans drawn by a seed: admissions, prompts in chunks, decoding, leases, growing page tables, cancellations."""

    def __init__(self, name: str, seed: int, n_plans: int = 8) -> None:
        self._draw = random.Random(seed)
        self._sequences = sequences_of(name)
        self._free = list(range(N_PAGES))
        self._draw.shuffle(self._free)
        self._owner: dict[int, Sequence] = {}
        self._done: dict[int, int] = {}  # prompt tokens that are in
        self._pages: dict[int, list[int]] = {}
        self.plans = [self._plan(i) for i in range(n_plans)]
        self.plans.append(Plan(quits=True, waits=self._draw.random() < 0.5))

    def _plan(self, i: int) -> Plan:
        draw = self._draw
        fields: dict[int, dict[Slot, int]] = {}
        pages: dict[int, tuple[int, ...]] = {}
        if not self._owner or draw.random() < 0.4:
            self._admit(fields, pages)
        elif draw.random() < 0.5:
            self._grow(fields, pages)
        ready = [slot for slot, sequence in self._owner.items() if self._done[slot] == len(sequence.prompt)]
        decode_slots = tuple(slot for slot in ready if draw.random() < 0.8)
        rows = list(self._chunks(len(decode_slots), everything=not decode_slots))
        if not decode_slots and not rows:
            decode_slots = tuple(ready)
        return Plan(decode_slots, tuple(rows), draw.choice((1, 1, 2, 3)), fields, pages, waits=draw.random() < 0.3)

    def _admit(self, fields: dict[int, dict[Slot, int]], pages: dict[int, tuple[int, ...]]) -> None:
        """A sequence begins in a free slot, or in one whose sequence is cancelled for it."""
        draw = self._draw
        slot = draw.randrange(SLOTS)
        sequence = draw.choice(self._sequences)
        self._free += self._pages.pop(slot, [])
        n = -(-(len(sequence.prompt) + draw.choice((1, 2, 8))) // PAGE)
        if n > len(self._free):
            self._owner.pop(slot, None)
            fields[slot] = {Slot.LIVE: 0}
            return
        self._owner[slot], self._done[slot] = sequence, 0
        self._pages[slot] = [self._free.pop(0) for _ in range(n)]
        pages[slot] = tuple(self._pages[slot])
        new = (0, 0, 0, draw.choice((2, 8)), 1, n * PAGE, sequence.number)
        fields[slot] = dict(zip(Slot, new, strict=True))

    def _grow(self, fields: dict[int, dict[Slot, int]], pages: dict[int, tuple[int, ...]]) -> None:
        """A sequence gets another page."""
        slot = self._draw.choice(list(self._owner))
        if self._free and len(self._pages[slot]) < MAX_LEN // PAGE:
            self._pages[slot].append(self._free.pop(0))
            pages[slot] = tuple(self._pages[slot])
            fields[slot] = {Slot.ROOM: len(self._pages[slot]) * PAGE}

    def _chunks(self, n_rows: int, *, everything: bool):
        """Rows of the next parts of prompts."""
        for slot, sequence in self._owner.items():
            done, left = self._done[slot], len(sequence.prompt) - self._done[slot]
            n = min(left, 8 - n_rows, 8 if everything or self._draw.random() < 0.5 else self._draw.randrange(8))
            for position in range(done, done + n):
                last = position + 1 == len(sequence.prompt)
                yield Prefill(slot, position, n_rows, sequence.prompt[position], last)
            self._done[slot] += n
            n_rows += n
