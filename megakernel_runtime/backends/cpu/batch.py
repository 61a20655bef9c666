"""What a step's rows have in common in all layers: worked out once, from slots to index tensors.

Rows are ordered so that decode rows of about equal context lie together and share one attention call; prefill chunks
follow, one call each. Nothing here grows with what a context could be, only with what it is.
Must not know: weights, instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megakernel_runtime.program.slots import Segment, Slot

# Contexts within one call are padded to the longest: it may be twice the shortest, or so many tokens longer.
_PADDING_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend in one call: one row of each of n decoding slots, or the n rows of one prefill chunk."""

    rows: slice
    chunk: bool
    n_contexts: int  # decode: n; chunk: 1
    context: int  # tokens that are looked at, the longest of the group
    pages: Tensor  # (n_contexts * pages a context,) i64, page tables one after the other
    mask: Tensor | None  # added to scores: decode (n, 1, 1, context), chunk (n, context); None: all is seen


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step in the order in which they are computed."""

    segments: tuple[Segment, ...]
    tokens: Tensor  # (T,) i64
    positions: Tensor  # (T,) i64
    places: Tensor  # (T,) i64: where in the flat cache a row's keys and values go
    groups: tuple[Group, ...]
    sampled: Tensor | None  # (R,) i64 rows that sample; None: all of them
    kv_tokens: int  # cached tokens that attention reads


class PageTables:
    """Page tables of all slots as one tensor, brought up to date before each step."""

    def __init__(self, max_slots: int, max_pages: int) -> None:
        self._tables = torch.zeros(max_slots, max_pages, dtype=torch.long)
        self._known: list[tuple[Slot | None, int]] = [(None, 0)] * max_slots

    def update(self, slot: Slot) -> None:
        """Copy what is new of a slot's page table."""
        n_pages = len(slot.pages)
        owner, known = self._known[slot.index]
        known = known if owner is slot else 0
        if known < n_pages or owner is not slot:
            self._tables[slot.index, known:n_pages] = torch.tensor(slot.pages[known:], dtype=torch.long)
            self._known[slot.index] = (slot, n_pages)

    def at(self, slots: Tensor, indices: Tensor) -> Tensor:
        """Return one page for each pair of a slot and an index into its page table, (n,)."""
        return self._tables[slots, indices]

    def read(self, slots: Tensor | int, first: int, last: int) -> Tensor:
        """Return pages first..last of one slot, (n,), or of several, (slots, n)."""
        return self._tables[slots, first:last]


class BatchMaker:
    """Makes batches for one cache and one window."""

    def __init__(
        self, max_slots: int, max_pages: int, page_size: int, window: int | None, mask_dtype: torch.dtype
    ) -> None:
        self._tables = PageTables(max_slots, max_pages)
        self._page_size = page_size
        self._window = window
        self._mask_dtype = mask_dtype

    def make(self, segments: Sequence[Segment]) -> Batch:
        """Return the batch of `segments`, which are of distinct slots."""
        for segment in segments:
            self._tables.update(segment.slot)
        decode = sorted((s for s in segments if s.count == 1), key=lambda s: s.end)
        chunks = [s for s in segments if s.count > 1]
        ordered = (*decode, *chunks)
        groups: list[Group] = []
        row = 0
        for of_group in _of_similar_length(decode):
            groups.append(self._decode_group(row, of_group))
            row += len(of_group)
        for chunk in chunks:
            groups.append(self._chunk_group(row, chunk))
            row += chunk.count
        positions = torch.tensor([p for s in ordered for p in range(s.start, s.end)])
        owners = torch.tensor([s.slot.index for s in ordered for _ in range(s.count)])
        pages = self._tables.at(owners, positions // self._page_size)
        samples = [s.samples for s in ordered]
        sampled = None
        if chunks or not all(samples):
            last_rows = torch.tensor([s.count for s in ordered]).cumsum(0) - 1
            sampled = last_rows[torch.tensor(samples)]
        return Batch(
            segments=ordered,
            tokens=torch.tensor([t for s in ordered for t in s.slot.tokens[s.start : s.end]]),
            positions=positions,
            places=pages * self._page_size + positions % self._page_size,
            groups=tuple(groups),
            sampled=sampled,
            kv_tokens=sum(group.context * group.n_contexts for group in groups),
        )

    def _decode_group(self, row: int, segments: Sequence[Segment]) -> Group:
        """Return the group of decode rows, which are sorted by rising context."""
        first = self._first_page(segments[0].start)
        longest = segments[-1].end
        slots = torch.tensor([s.slot.index for s in segments])
        context = longest - first * self._page_size
        mask = None
        ends = torch.tensor([s.end for s in segments])
        if len(segments) > 1 or self._window is not None:
            tokens = torch.arange(first * self._page_size, longest)
            mask = self._mask(tokens, ends - 1)[:, None, None, :]
        return Group(
            rows=slice(row, row + len(segments)),
            chunk=False,
            n_contexts=len(segments),
            context=context,
            pages=self._tables.read(slots, first, self._n_pages(longest)).reshape(-1),
            mask=mask,
        )

    def _chunk_group(self, row: int, segment: Segment) -> Group:
        first = self._first_page(segment.start)
        tokens = torch.arange(first * self._page_size, segment.end)
        return Group(
            rows=slice(row, row + segment.count),
            chunk=True,
            n_contexts=1,
            context=len(tokens),
            pages=self._tables.read(segment.slot.index, first, self._n_pages(segment.end)),
            mask=self._mask(tokens, torch.arange(segment.start, segment.end)),
        )

    def _mask(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return 0 where a row at a position sees a token, else -inf: (positions, tokens)."""
        distance = positions.unsqueeze(1) - tokens
        hidden = distance < 0
        if self._window is not None:
            hidden |= distance >= self._window
        return torch.zeros(hidden.shape, dtype=self._mask_dtype).masked_fill_(hidden, -torch.inf)

    def _first_page(self, position: int) -> int:
        """Return the first page that a row at `position` looks at."""
        return 0 if self._window is None else max(0, position - self._window + 1) // self._page_size

    def _n_pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)


def _of_similar_length(decode: Sequence[Segment]) -> list[list[Segment]]:
    """Cut rows sorted by context into runs that waste little on padding."""
    runs: list[list[Segment]] = []
    for segment in decode:
        shortest = runs[-1][0].end if runs else 0
        if runs and segment.end <= max(2 * shortest, shortest + _PADDING_TOKENS):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs
