"""The per-slot state of a step, and what ADVANCE means: which tokens a row stands for, and when a sequence is finished.

Shared by everything that runs programs on the host. Every breach of the plan contract is a RuntimeFault that names the
slot: it is a bug of the planner. Standard library only; must not know: tensors, devices, requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megakernel_runtime.interface import FinishReason, PageGrant, PrefillRow, RuntimeFault, SamplingParams, SlotAdmit


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """One sequence on the device. `tokens` is everything known of it; the KV of tokens[:computed] lies in `pages`."""

    index: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    computed: int
    pages: list[int] = field(default_factory=list[int])
    finish: FinishReason | None = None

    @property
    def n_generated(self) -> int:
        """How many tokens were generated: also the counter of the random stream for the next one."""
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring rows of one slot in a step: tokens[start : start + count] are computed, the last row may sample."""

    slot: Slot
    start: int
    count: int
    samples: bool

    @property
    def end(self) -> int:
        """The context that the last row sees, in tokens."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled token. `top` falls in logprob, equal ones by rising token id."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SlotTable:
    """All slots of a runtime."""

    def __init__(self, max_slots: int, page_size_tokens: int, n_pages: int, max_model_len_tokens: int) -> None:
        self._slots: list[Slot | None] = [None] * max_slots
        self._page_size = page_size_tokens
        self._n_pages = n_pages
        self._max_len = max_model_len_tokens

    def admit(self, admit: SlotAdmit) -> None:
        """Put a sequence into a free slot."""
        if self._slots[self._in_range(admit.slot)] is not None:
            raise RuntimeFault(f"slot {admit.slot} is taken: release it before admitting to it")
        n_tokens = len(admit.tokens)
        if not 0 < n_tokens <= self._max_len:
            raise RuntimeFault(f"slot {admit.slot} is given {n_tokens} tokens; between 1 and {self._max_len} fit")
        if not 0 < admit.prompt_len <= n_tokens:
            raise RuntimeFault(f"slot {admit.slot} has {n_tokens} tokens, of which {admit.prompt_len} are its prompt")
        if admit.cached_len % self._page_size or not 0 <= admit.cached_len < n_tokens:
            raise RuntimeFault(
                f"slot {admit.slot} has {admit.cached_len} of {n_tokens} tokens cached: it must be fewer than all, and "
                f"a multiple of the page size {self._page_size}"
            )
        slot = Slot(admit.slot, list(admit.tokens), admit.prompt_len, admit.sampling, admit.cached_len)
        self._append_pages(slot, admit.pages)
        if len(slot.pages) * self._page_size < admit.cached_len:
            raise RuntimeFault(f"slot {admit.slot} has {admit.cached_len} tokens cached, {len(slot.pages)} pages")
        self._slots[admit.slot] = slot

    def grant(self, grant: PageGrant) -> None:
        """Append pages to a slot's page table."""
        self._append_pages(self.taken(grant.slot), grant.pages)

    def release(self, index: int) -> None:
        """Free a slot."""
        self.taken(index)
        self._slots[index] = None

    def prefill(self, row: PrefillRow) -> Segment | None:
        """Return the rows of `row`, None if its slot is finished."""
        slot = self.taken(row.slot)
        if slot.finish is not None:
            return None
        if row.count < 1 or row.start != slot.computed or row.start + row.count > len(slot.tokens):
            raise RuntimeFault(
                f"slot {row.slot} cannot prefill {row.count} tokens from {row.start}: it has computed {slot.computed} "
                f"of {len(slot.tokens)}"
            )
        return self._segment(slot, row.count)

    def decode(self, index: int) -> Segment | None:
        """Return the one row that computes a slot's last token and samples the next, None if the slot is finished."""
        slot = self.taken(index)
        if slot.finish is not None:
            return None
        if slot.computed != len(slot.tokens) - 1:
            raise RuntimeFault(f"slot {index} cannot decode: it has computed {slot.computed} of {len(slot.tokens)}")
        return self._segment(slot, 1)

    def has_room(self, index: int) -> bool:
        """Whether the page table of a slot has room for the KV of one more token."""
        slot = self.taken(index)
        return slot.computed < len(slot.pages) * self._page_size

    def is_finished(self, index: int) -> bool:
        """Whether a slot's rows are skipped."""
        return self.taken(index).finish is not None

    def holds(self, slot: Slot) -> bool:
        """Whether a sequence is still in its slot."""
        return self._slots[slot.index] is slot

    def advance(self, segment: Segment, token: int | None) -> FinishReason | None:
        """Record that `segment` was computed and, where it samples, gave `token`; return why the slot is finished."""
        slot = segment.slot
        slot.computed = segment.end
        if token is None:
            return None
        slot.tokens.append(token)
        if token in slot.sampling.stop_token_ids and slot.n_generated > slot.sampling.min_tokens:
            slot.finish = FinishReason.STOP
        elif slot.n_generated >= slot.sampling.max_tokens or len(slot.tokens) >= self._max_len:
            slot.finish = FinishReason.LENGTH
        return slot.finish

    def check_integrity(self) -> None:
        """AssertionError unless every slot's pages are distinct and hold what it has computed."""
        for slot in filter(None, self._slots):
            assert len(set(slot.pages)) == len(slot.pages), f"slot {slot.index} has a page twice"
            assert slot.computed <= len(slot.pages) * self._page_size, f"slot {slot.index} computed beyond its pages"
            assert slot.computed <= len(slot.tokens), f"slot {slot.index} computed tokens that it does not have"

    def _segment(self, slot: Slot, count: int) -> Segment:
        end = slot.computed + count
        if end > len(slot.pages) * self._page_size:
            raise RuntimeFault(
                f"slot {slot.index} needs the KV of {end} tokens but has {len(slot.pages)} pages of {self._page_size}: "
                f"grant pages first"
            )
        return Segment(slot, slot.computed, count, end == len(slot.tokens))

    def _append_pages(self, slot: Slot, pages: tuple[int, ...]) -> None:
        for page in pages:
            if not 0 <= page < self._n_pages:
                raise RuntimeFault(f"slot {slot.index} is granted page {page}; there are 0 to {self._n_pages - 1}")
        slot.pages += pages
        if len(slot.pages) > -(-self._max_len // self._page_size):
            raise RuntimeFault(
                f"slot {slot.index} is granted {len(slot.pages)} pages of {self._page_size} tokens, more than a "
                f"context of {self._max_len} can fill"
            )

    def taken(self, index: int) -> Slot:
        """Return the sequence in a slot; RuntimeFault if it is free."""
        slot = self._slots[self._in_range(index)]
        if slot is None:
            raise RuntimeFault(f"slot {index} is free: admit a sequence first")
        return slot

    def _in_range(self, index: int) -> int:
        if not 0 <= index < len(self._slots):
            raise RuntimeFault(f"slot {index} does not exist; there are slots 0 to {len(self._slots) - 1}")
        return index
