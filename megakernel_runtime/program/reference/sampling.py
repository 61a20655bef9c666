"""The meaning of SAMPLE: from logits and `SamplingParams` to tokens, in batches of any mix of parameters.

The specification that device code is compared with, and fast enough for the CPU backend: rows without penalties cost
one argmax together, rows that draw cost a few passes over the vocabulary. Each row's result depends on its logits and
its slot alone, never on its neighbours. Must not know: models, devices, plans.

In this order: penalties and bias; logprobs are read; masks; then greedy choice, or temperature, top-k, top-p, min-p
and a draw by the inverse distribution function over rising token ids. Equal logits are ordered by rising token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megakernel_runtime.interface import SamplingParams
from megakernel_runtime.program.philox import uniform
from megakernel_runtime.program.reference.distribution import draw, keep_min_p, keep_top_k, keep_top_p, tempered
from megakernel_runtime.program.reference.untyped import floats, integers
from megakernel_runtime.program.slots import Choice, Slot


@dataclass(slots=True)
class _Counts:
    """What the penalties of one slot count, kept up to date as tokens are added."""

    seen: Tensor  # (V,) bool: in prompt or output
    generated: Tensor  # (V,) f32: times in the output
    n_counted: int = 0  # tokens of the slot that are in the counts

    def absorb(self, slot: Slot) -> None:
        fresh = torch.tensor(slot.tokens[self.n_counted :], dtype=torch.long, device=self.seen.device)
        self.seen[fresh] = True
        output = fresh[max(0, slot.prompt_len - self.n_counted) :]
        self.generated.index_add_(0, output, torch.ones(len(output), device=output.device))
        self.n_counted = len(slot.tokens)


class Sampler:
    """Chooses tokens for slots. Holds the penalty counts of slots that have penalties, as long as those live."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Slot, _Counts] = WeakKeyDictionary()

    def sample(self, logits: Tensor, slots: Sequence[Slot]) -> list[Choice]:
        """Return the next token of each slot. `logits` is (len(slots), V) f32; it is overwritten."""
        for row, slot in zip(logits, slots, strict=True):
            self._adjust(row, slot)
        with_logprobs = [i for i, slot in enumerate(slots) if slot.sampling.top_logprobs is not None]
        log_sums = dict(zip(with_logprobs, floats(logits[with_logprobs].logsumexp(-1)), strict=True))
        tops = {i: _top(logits[i], slots[i].sampling.top_logprobs or 0, log_sums[i]) for i in with_logprobs}
        for row, slot in zip(logits, slots, strict=True):
            _mask(row, slot)
        tokens = _choose(logits, slots)
        return [
            Choice(token, logits[i, token].item() - log_sums[i], tops[i]) if i in log_sums else Choice(token)
            for i, token in enumerate(tokens)
        ]

    def _adjust(self, row: Tensor, slot: Slot) -> None:
        """Apply penalties and bias to `row`, (V,), in place."""
        p = slot.sampling
        if p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty:
            counts = self._counts_of(slot, row)
            if p.repetition_penalty != 1.0:
                penalised = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
                torch.where(counts.seen, penalised, row, out=row)
            row.sub_(counts.generated.clamp(max=1.0), alpha=p.presence_penalty)
            row.sub_(counts.generated, alpha=p.frequency_penalty)
        if p.logit_bias:
            ids, values = zip(*p.logit_bias, strict=True)
            row.index_add_(0, torch.tensor(ids, device=row.device), torch.tensor(values, device=row.device))

    def _counts_of(self, slot: Slot, row: Tensor) -> _Counts:
        counts = self._counts.get(slot)
        if counts is None:
            counts = _Counts(torch.zeros_like(row, dtype=torch.bool), torch.zeros_like(row))
            self._counts[slot] = counts
        counts.absorb(slot)
        return counts


def _top(row: Tensor, n: int, log_sum: float) -> tuple[tuple[int, float], ...]:
    """Return the `n` most probable tokens of adjusted logits (V,) with their logprobs."""
    if n == 0:
        return ()
    n = min(n, len(row))
    ids = keep_top_k(row, n).nonzero().squeeze(-1)
    pairs = zip(integers(ids), floats(row[ids] - log_sum), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _mask(row: Tensor, slot: Slot) -> None:
    """Set the logits of tokens that may not be chosen to -inf, in place. Stop tokens stay if nothing else may come."""
    p = slot.sampling
    banned = set(p.stop_token_ids) if slot.n_generated < p.min_tokens else set[int]()
    if p.allowed_token_ids:
        allowed = torch.tensor(sorted(set(p.allowed_token_ids) - banned or p.allowed_token_ids), device=row.device)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    elif banned:
        row[torch.tensor(sorted(banned), device=row.device)] = -torch.inf


def _choose(logits: Tensor, slots: Sequence[Slot]) -> list[int]:
    """Return a token for each row of masked logits, (R, V)."""
    drawing = [i for i, slot in enumerate(slots) if not slot.sampling.greedy]
    # max gives the first of equal ones, and is three times faster than argmax
    tokens = integers(logits.max(-1).indices) if len(drawing) < len(slots) else [0] * len(slots)
    if drawing:
        params = [slots[i].sampling for i in drawing]
        numbers = [uniform(slots[i].sampling.seed, slots[i].n_generated) for i in drawing]
        rows = logits if len(drawing) == len(slots) else logits[drawing]
        for i, token in zip(drawing, draw(_weights(rows, params), numbers), strict=True):
            tokens[i] = token
    return tokens


def _weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return what each token of each row weighs in the draw, (R, V) f32: 0 if it cannot be chosen."""
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=logits.device)
    weights = tempered(logits, temperature.unsqueeze(-1))
    for row, p in zip(weights, params, strict=True):
        if 0 < p.top_k < len(row):
            row.mul_(keep_top_k(row, p.top_k))
        if p.top_p < 1.0:
            row.mul_(keep_top_p(row, p.top_p))
        if p.min_p > 0.0:
            row.mul_(keep_min_p(row, p.min_p))
    return weights
