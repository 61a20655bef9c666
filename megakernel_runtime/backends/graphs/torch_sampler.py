"""The sampler of a step in plain torch: reads the slots' fields as the kernels do, and chooses as the reference does.

Must not know: kernels, `SamplingParams`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from megakernel_runtime.backends.graphs.ops import Tables
from megakernel_runtime.backends.graphs.shapes import Shape
from megakernel_runtime.device_state.fields import MASK_BITS, PROMPT_COUNT, Field, Flag, Outcome
from megakernel_runtime.program.philox import uniform
from megakernel_runtime.program.reference.distribution import draw, keep_min_p, keep_top_k, keep_top_p, tempered
from megakernel_runtime.program.reference.untyped import integers


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one slot, read from the device."""

    words: list[int]

    def __getitem__(self, field: Field) -> int:
        return self.words[field]

    def float_at(self, field: Field) -> float:
        return struct.unpack("f", struct.pack("i", self.words[field]))[0]

    @property
    def top_p(self) -> float:
        return struct.unpack("d", struct.pack("ii", *self.words[Field.TOP_P : Field.TOP_P + 2]))[0]

    @property
    def seed(self) -> int:
        return (self[Field.SEED_LOW] & 0xFFFFFFFF) | (self[Field.SEED_HIGH] & 0xFFFFFFFF) << 32


class TorchSampler:
    """One output after the other."""

    def __init__(self, tables: Tables) -> None:
        self._t = tables

    def sample(self, shape: Shape, logits: Tensor) -> None:
        """See ops.Ops.sample."""
        t = self._t
        for o, row in enumerate(integers(t.frame.outs[: shape.outs])):
            t.result[o, 1] = Outcome.SKIPPED
            slot = int(t.frame.rows[row, 0]) if row >= 0 else -1
            if slot >= 0 and t.state.fields[slot, Field.LIVE] != 0:
                self._sample_one(o, slot, logits[o], int(t.positions[row]), full=shape.full)

    def _sample_one(self, o: int, slot: int, z: Tensor, position: int, *, full: bool) -> None:
        t = self._t
        fields = _Fields(integers(t.state.fields[slot]))
        if full:
            self._adjust(z, slot, fields)
            self._logprobs(o, z, fields[Field.N_TOP])
            self._mask(z, slot, fields)
        token = _choose(z, fields)
        t.result[o, 0] = token
        t.result[o, 1] = self._advance(slot, token, position, fields)
        if full:
            t.result[o, 2] = (z[token] - t.log_sums[o]).view(torch.int32)
            if fields[Field.FLAGS] & Flag.PENALISED:
                t.state.counts[slot, token] += 1

    def _adjust(self, z: Tensor, slot: int, fields: _Fields) -> None:
        if fields[Field.FLAGS] & Flag.PENALISED:
            counts = self._t.state.counts[slot]
            generated = (counts & (PROMPT_COUNT - 1)).float()
            repetition = fields.float_at(Field.REPETITION)
            z.copy_(torch.where(counts != 0, torch.where(z > 0, z / repetition, z * repetition), z))
            z.sub_(generated.clamp(max=1.0), alpha=fields.float_at(Field.PRESENCE))
            z.sub_(generated, alpha=fields.float_at(Field.FREQUENCY))
        if fields[Field.FLAGS] & Flag.BIASED:
            z.add_(self._t.state.bias[slot])

    def _logprobs(self, o: int, z: Tensor, wanted: int) -> None:
        if wanted < 0:
            return
        t = self._t
        t.log_sums[o] = z.logsumexp(-1)
        order = z.argsort(descending=True, stable=True)[:wanted]
        t.top_ids[o, :wanted] = -1
        t.top_ids[o, : len(order)] = order.int()
        t.top_logprobs[o, : len(order)] = z[order] - t.log_sums[o]

    def _mask(self, z: Tensor, slot: int, fields: _Fields) -> None:
        state = self._t.state
        if fields[Field.GENERATED] < fields[Field.BAN_UNTIL]:
            z.masked_fill_(_unpacked(state.stops[slot], len(z)), -torch.inf)
        if fields[Field.FLAGS] & Flag.RESTRICTED:
            z.masked_fill_(~_unpacked(state.allowed[slot], len(z)), -torch.inf)

    def _advance(self, slot: int, token: int, position: int, fields: _Fields) -> Outcome:
        """Append `token` to the slot, which was computed up to `position`."""
        generated = fields[Field.GENERATED] + 1
        is_stop = bool(_unpacked(self._t.state.stops[slot], self._t.config.vocab_size)[token])
        outcome = Outcome.LENGTH if generated >= fields[Field.LIMIT] else Outcome.RUNS
        if is_stop and generated > fields[Field.MIN_TOKENS]:
            outcome = Outcome.STOP
        moved = {
            Field.TOKEN: token,
            Field.POSITION: position + 1,
            Field.GENERATED: generated,
            Field.LIVE: outcome is Outcome.RUNS,
        }
        for field, value in moved.items():
            self._t.state.fields[slot, field] = value
        return outcome


def _choose(z: Tensor, fields: _Fields) -> int:
    """Return the token that masked logits (V,) and the slot's random stream give."""
    temperature = fields.float_at(Field.TEMPERATURE)
    if temperature == 0.0:
        return int(z.max(-1).indices)
    weights = tempered(z.unsqueeze(0), torch.full((1, 1), temperature, device=z.device))[0]
    if fields[Field.TOP_K]:
        weights.mul_(keep_top_k(weights, fields[Field.TOP_K]))
    if fields.top_p < 1.0:
        weights.mul_(keep_top_p(weights, fields.top_p))
    weights.mul_(keep_min_p(weights, fields.float_at(Field.MIN_P)))
    return draw(weights.unsqueeze(0), [uniform(fields.seed, fields[Field.GENERATED])])[0]


def _unpacked(mask: Tensor, n: int) -> Tensor:
    """Return a bit mask as (n,) bool."""
    bits = torch.arange(MASK_BITS, device=mask.device, dtype=torch.int32)
    return ((mask.unsqueeze(1) >> bits) & 1).flatten()[:n] != 0
