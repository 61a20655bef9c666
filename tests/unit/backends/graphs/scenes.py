"""Steps in the middle of things, to compare the operations of two devices or implementations on: same seed, same scene."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megakernel_runtime.backends.graphs.frame import Frame, make_frame
from megakernel_runtime.backends.graphs.ops import Tables, make_tables
from megakernel_runtime.backends.graphs.shapes import Shape
from megakernel_runtime.interface import Capacity, PrefillRow, SamplingParams, SlotAdmit
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.slots import Segment, SlotTable

TINY = ModelConfig(
    architecture="llama",
    vocab_size=300,
    hidden_size=48,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_size=72,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_position=1024,
)
CONFIGS = {
    "gqa2": TINY,
    "gqa3-qk-norm": replace(TINY, n_heads=6, qk_norm=True, head_dim=24, hidden_size=40),
    "mha-window": replace(TINY, n_kv_heads=4, sliding_window=37, vocab_size=97),
    "mqa": replace(TINY, n_heads=5, n_kv_heads=1, head_dim=32),
}
# (tokens, of which computed) of each slot: decode rows of short and long contexts, chunks, ends of prompts
DECODING = ((1, 0), (20, 19), (130, 129), (301, 300), (64, 63), (700, 699))
CHUNKS = ((70, 0), (40, 32), (120, 64, 20), (33, 32))  # third: how many tokens of the chunk, else all


@dataclass(frozen=True)
class Scene:
    tables: Tables
    frame: Frame
    shape: Shape

    def rows(self, values):
        """Values (T, ...) of rows that run."""
        return values[: self.frame.needs.rows].float().cpu()


def capacity_of(config, max_slots=16, page=8, max_len=1024, n_pages=512, max_step_tokens=512):
    return Capacity(max_slots, n_pages, page, max_len, max_step_tokens, 8, 2, config.vocab_size)


def segments_of(config, slots, seed, page, *, decoding=DECODING, chunks=CHUNKS, sampling=None):
    """Admit all and return their segments. Pages are dealt at random."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(512, generator=generator).tolist()
    segments: list[Segment] = []
    for index, (length, computed, *count) in enumerate((*decoding, *chunks)):
        tokens = tuple(torch.randint(config.vocab_size, (length,), generator=generator).tolist())
        pages = tuple(free.pop() for _ in range(-(-(length + 1) // page)))
        params = sampling(index) if sampling else SamplingParams(temperature=0.0, max_tokens=50)
        slots.admit(SlotAdmit(index, tokens, max(1, length - index), params, computed // page * page, pages))
        slot = slots._slots[index]
        slot.computed = computed
        segment = slots.prefill(PrefillRow(index, computed, count[0] if count else length - computed))
        assert segment is not None
        segments.append(segment)
    return segments


def make_scene(config, device, dtype=torch.float32, seed=0, page=8, *, padded=False, full=False, **kw):
    """Return a scene whose slots are known to the device."""
    capacity = capacity_of(config, page=page)
    tables = make_tables(config, capacity, torch.device(device), dtype)
    slots = SlotTable(capacity.max_slots, page, capacity.n_pages, capacity.max_model_len_tokens)
    segments = segments_of(config, slots, seed, page, **kw)
    frame = make_frame(segments, full=full)
    tables.state.sync([segment.slot for segment in segments])
    shape = frame.needs
    if padded:
        shape = replace(shape, rows=shape.rows + 13, spans=16, blocks=shape.blocks and shape.blocks + 3, outs=16)
    words = tables.frame.fill(frame, shape)
    tables.frame.words[: len(words)] = words.to(device)
    tables.cache.copy_(drawn(tables.cache.shape, seed + 1, device, dtype))
    update = tables.state.take()
    addresses = torch.from_numpy(update.addresses).long()
    tables.state.arena.index_copy_(0, addresses.to(device), torch.from_numpy(update.words).to(device))
    return Scene(tables, frame, shape)


def drawn(shape, seed, device, dtype=torch.float32, scale=1.0):
    """Normal numbers, the same on any device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).to(device)


def sampling_menu(index):
    """Parameters of every kind, by turns."""
    menu = [
        SamplingParams(temperature=0.0, max_tokens=50),
        SamplingParams(temperature=1.0, seed=1, max_tokens=50),
        SamplingParams(temperature=0.7, top_k=5, seed=2**63 + 5, max_tokens=50, top_logprobs=0),
        SamplingParams(temperature=1.3, top_p=0.8, seed=3, max_tokens=50, top_logprobs=20),
        SamplingParams(temperature=0.9, top_k=40, top_p=0.5, min_p=0.02, seed=4, max_tokens=50),
        SamplingParams(
            temperature=0.0,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            top_logprobs=3,
            max_tokens=50,
        ),
        SamplingParams(
            temperature=1.0, logit_bias=((3, 4.0), (70, -100.0), (3, 0.5)), seed=6, top_logprobs=5, max_tokens=50
        ),
        SamplingParams(
            temperature=1.0,
            allowed_token_ids=(5, 6, 64, 96),
            seed=7,
            stop_token_ids=(6, 64),
            min_tokens=45,
            max_tokens=50,
        ),
        SamplingParams(temperature=1.5, min_p=0.3, frequency_penalty=-0.5, seed=8, max_tokens=50),
        SamplingParams(temperature=0.0, stop_token_ids=tuple(range(96)), max_tokens=50),
    ]
    return menu[index % len(menu)]


def plain_menu(index):
    """Temperature and cuts of every combination, by turns; sequences end soon."""
    return SamplingParams(
        temperature=index % 3 / 2,
        seed=index,
        top_k=index % 4 * 9,
        top_p=1 - index % 5 / 9,
        min_p=index % 2 / 9,
        max_tokens=index + 2 + index % 4,
    )
