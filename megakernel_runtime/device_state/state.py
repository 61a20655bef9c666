"""The state of all slots on the device: fields, page tables, masks, penalty counts, bias; and how the host writes it.

Everything lies in one arena of 32 bit words, so that whatever a plan changes is a few runs to clear and one list of
(address, word) pairs; this module only says what to write. The device itself moves TOKEN, POSITION, GENERATED, LIVE
and `counts` on.
Must not know: plans, steps, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel_runtime.device_state.fields import FIELD_WORDS, MASK_BITS, PROMPT_COUNT, Field, Flag
from megakernel_runtime.device_state.words import Words
from megakernel_runtime.interface import RuntimeFault, SamplingParams
from megakernel_runtime.program.slots import Slot

_INT32_MAX = 2**31 - 1
_NONE: Words = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Update:
    """What is to be written into the arena: first zeros to runs (first word, words), then a word to each address."""

    clears: tuple[tuple[int, int], ...]
    addresses: Words  # none twice
    words: Words


@dataclass(slots=True)
class _Known:
    """What of a slot the device has been told."""

    owner: Slot | None = None
    n_pages: int = 0
    masks: dict[int, int] = field(default_factory=dict[int, int])  # address -> word, of words that are not zero
    always_full: bool = False
    ban_until: int = 0


class SlotState:
    """Tensors of `max_slots` slots. `sync` brings a slot up to date, `take` gives what is to be written."""

    def __init__(
        self, max_slots: int, page_size_tokens: int, vocab_size: int, max_model_len_tokens: int, device: torch.device
    ) -> None:
        """Allocate; for each slot the two arrays over the vocabulary take 8 bytes a token."""
        max_pages = -(-max_model_len_tokens // page_size_tokens)
        self._page_size = page_size_tokens
        self.mask_words = -(-vocab_size // MASK_BITS)
        widths = (FIELD_WORDS, max_pages, self.mask_words, self.mask_words, vocab_size, vocab_size)
        self.arena = torch.zeros(max_slots * sum(widths), dtype=torch.int32, device=device)
        parts = _split(self.arena, [max_slots * width for width in widths])
        fields, pages, stops, allowed, counts, bias = (part.view(max_slots, -1) for part in parts)
        self.fields = fields  # (slots, FIELD_WORDS), see fields.py
        self.pages = pages  # (slots, max_pages)
        self.stops = stops  # (slots, mask_words) bit masks over the vocabulary
        self.allowed = allowed
        self.counts = counts  # (slots, V): PROMPT_COUNT if in the prompt, plus how often in the output
        self.bias = bias.view(torch.float32)  # (slots, V)
        self._vocab_size = vocab_size
        self._max_len = max_model_len_tokens
        self._known = [_Known() for _ in range(max_slots)]
        self._pending: list[tuple[Words, Words]] = []  # addresses, words
        self._clears: list[tuple[int, int]] = []

    def sync(self, slots: Sequence[Slot]) -> bool:
        """Note for the next update what is new of slots.

        Returns whether the next token of any of them needs more than temperature and cuts.
        """
        full = False
        for slot in slots:
            known = self._known[slot.index]
            if known.owner is not slot:
                known.owner, known.n_pages = slot, 0
                self._admit(slot, known)
            elif known.n_pages < len(slot.pages):
                room = np.array([len(slot.pages) * self._page_size], dtype=np.int32)
                self._put(self.fields, slot.index, np.array([Field.ROOM]), room)
            if known.n_pages < len(slot.pages):
                fresh = np.array(slot.pages[known.n_pages :], dtype=np.int32)
                self._put(self.pages, slot.index, np.arange(known.n_pages, len(slot.pages)), fresh)
                known.n_pages = len(slot.pages)
            full = full or known.always_full or (known.ban_until > 0 and slot.n_generated < known.ban_until)
        return full

    def take(self) -> Update:
        """Return what was noted since the last call."""
        addresses, words = zip(*self._pending, strict=True) if self._pending else ((_NONE,), (_NONE,))
        update = Update(tuple(self._clears), np.concatenate(addresses), np.concatenate(words))
        self._pending.clear()
        self._clears.clear()
        return update

    def forget(self) -> None:
        """Take every slot for new when it is synced next, for the device may have moved it wrongly."""
        for known in self._known:
            known.owner = None

    # ---------------------------------------------------------------- admission

    def _admit(self, slot: Slot, known: _Known) -> None:
        p = slot.sampling
        tokens = self._tokens(slot, "token", slot.tokens)
        flags = _flags(p)
        known.always_full = bool(flags) or p.top_logprobs is not None
        known.ban_until = p.min_tokens if _may_ban_stops(p) else 0
        self._put(self.fields, slot.index, np.arange(FIELD_WORDS), self._fields_of(slot, flags, known.ban_until))
        self._put_masks(slot, known)
        if Flag.PENALISED in flags:
            self._put_counts(slot, tokens)
        if Flag.BIASED in flags:
            self._put_bias(slot)

    def _fields_of(self, slot: Slot, flags: Flag, ban_until: int) -> Words:
        p = slot.sampling
        words = np.zeros(FIELD_WORDS, dtype=np.int32)
        words[Field.TOKEN] = slot.tokens[-1]
        words[Field.POSITION] = len(slot.tokens) - 1
        words[Field.GENERATED] = slot.n_generated
        words[Field.LIVE] = 1
        words[Field.ROOM] = len(slot.pages) * self._page_size
        words[Field.LIMIT] = min(p.max_tokens, self._max_len - slot.prompt_len)
        words[Field.MIN_TOKENS] = min(p.min_tokens, _INT32_MAX)
        words[Field.BAN_UNTIL] = min(ban_until, _INT32_MAX)
        words[Field.FLAGS] = flags
        words[Field.TOP_K] = p.top_k if 0 < p.top_k < self._vocab_size else 0
        words[Field.N_TOP] = -1 if p.top_logprobs is None else p.top_logprobs
        words.view(np.uint32)[[Field.SEED_LOW, Field.SEED_HIGH]] = p.seed & 0xFFFFFFFF, p.seed >> 32 & 0xFFFFFFFF
        floats = words.view(np.float32)
        floats[Field.TEMPERATURE] = p.temperature
        floats[Field.MIN_P] = p.min_p
        floats[Field.REPETITION] = p.repetition_penalty
        floats[Field.PRESENCE] = p.presence_penalty
        floats[Field.FREQUENCY] = p.frequency_penalty
        words.view(np.float64)[Field.TOP_P // 2] = p.top_p
        return words

    def _put_masks(self, slot: Slot, known: _Known) -> None:
        """Write the words of both masks that differ from what the device has: mostly one or two."""
        p = slot.sampling
        stops = [token for token in p.stop_token_ids if token < self._vocab_size]  # others are never chosen
        wanted: dict[int, int] = {}
        for name, mask, ids in (
            ("stop token", self.stops, stops),
            ("allowed token", self.allowed, p.allowed_token_ids),
        ):
            first = int(mask.storage_offset()) + slot.index * self.mask_words
            for token in self._tokens(slot, name, ids).tolist():
                address = first + token // MASK_BITS
                wanted[address] = wanted.get(address, 0) | 1 << token % MASK_BITS
        changed = dict.fromkeys(known.masks, 0) | wanted
        known.masks = wanted
        words = np.fromiter(changed.values(), dtype=np.uint32, count=len(changed)).view(np.int32)
        self._pending.append((np.fromiter(changed, dtype=np.int32, count=len(changed)), words))

    def _put_counts(self, slot: Slot, tokens: Words) -> None:
        output, times = np.unique(tokens[slot.prompt_len :], return_counts=True)
        counts = dict(zip(output.tolist(), times.tolist(), strict=True))
        for token in np.unique(tokens[: slot.prompt_len]).tolist():
            counts[token] = counts.get(token, 0) + PROMPT_COUNT
        self._clear(self.counts, slot.index)
        self._put(self.counts, slot.index, np.array(list(counts)), np.array(list(counts.values()), dtype=np.int32))

    def _put_bias(self, slot: Slot) -> None:
        ids, values = zip(*slot.sampling.logit_bias, strict=True)
        at, inverse = np.unique(self._tokens(slot, "biased token", ids), return_inverse=True)
        summed = np.zeros(len(at), dtype=np.float32)
        np.add.at(summed, inverse, np.array(values, dtype=np.float32))
        self._clear(self.bias, slot.index)
        self._put(self.bias, slot.index, at, summed.view(np.int32))

    # ---------------------------------------------------------------- words

    def _clear(self, part: Tensor, row: int) -> None:
        self._clears.append((int(part.storage_offset()) + row * part.shape[1], part.shape[1]))

    def _put(self, part: Tensor, row: int, columns: NDArray[np.integer], words: Words) -> None:
        first = int(part.storage_offset()) + row * part.shape[1]
        self._pending.append(((columns + first).astype(np.int32), words))

    def _tokens(self, slot: Slot, name: str, ids: object) -> Words:
        """Return ids as an array. RuntimeFault if one lies outside the vocabulary."""
        tokens = np.array(ids, dtype=np.int64)
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise RuntimeFault(f"slot {slot.index} has {name} {wrong}; there are 0 to {self._vocab_size - 1}")
        return tokens.astype(np.int32)


def _flags(p: SamplingParams) -> Flag:
    flags = Flag(0)
    if p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty:
        flags |= Flag.PENALISED
    if p.logit_bias:
        flags |= Flag.BIASED
    if p.allowed_token_ids:
        flags |= Flag.RESTRICTED
    return flags


def _may_ban_stops(p: SamplingParams) -> bool:
    """Whether stop tokens can be masked out: not if they are all that is allowed."""
    allowed, stops = set(p.allowed_token_ids), set(p.stop_token_ids)
    return bool(stops) and (not allowed or not allowed <= stops)


def _split(words: Tensor, sizes: list[int]) -> list[Tensor]:
    ends = np.cumsum(sizes).tolist()
    return [words[end - size : end] for size, end in zip(sizes, ends, strict=True)]
