"""The reference interpreter: executes a program instruction by instruction on whole operations.

It is the specification: written to be read, and exact. Sums are f32, operands are rounded where the program's buffers
say so; `dtype` says what "bf16" of the instruction set means here: f32 for proofs, bf16 to see what a device sees. Runs
any mix of prefill chunks and decode rows in one step. Must not know: plans, leases, devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.builder import PARTIAL_EXTRA_COLUMNS, build_program
from megakernel_runtime.program.isa import Instruction, Op
from megakernel_runtime.program.reference.attention import attend, combine
from megakernel_runtime.program.reference.kv_cache import PagedKv
from megakernel_runtime.program.reference.rope import inverse_frequencies, rotate
from megakernel_runtime.program.reference.sampling import Sampler
from megakernel_runtime.program.slots import Choice, Segment, SlotTable


class Interpreter:
    """A program, its weights and its KV cache. `step` runs the program once over T rows."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        slots: SlotTable,
        *,
        n_pages: int,
        page_size_tokens: int,
        dtype: torch.dtype = torch.float32,
        span_tokens: int = 64,
    ) -> None:
        self.program = build_program(config)
        self.kv = PagedKv(config, n_pages, page_size_tokens, dtype)
        self.logits: Tensor = torch.empty(0, config.vocab_size)  # of the rows that sampled in the last step
        self._config = config
        self._dtype = dtype
        self._weights = {name: w.to(dtype) for name, w in weights.items()}
        self._slots = slots
        self._span = span_tokens
        self._sampler = Sampler()
        self._frequencies = inverse_frequencies(config)
        # Between instructions: (T, columns) each; "partials" has a row for each (row, span), "logits" for each sample.
        self._buffers: dict[str, Tensor] = {}
        self._segments: Sequence[Segment] = ()
        self._positions = torch.empty(0, dtype=torch.long)
        self._choices: list[Choice] = []
        self._execute: dict[Op, Callable[[Instruction], None]] = {
            Op.EMBED: self._embed,
            Op.QKV: self._qkv,
            Op.ATTEND: self._attend,
            Op.COMBINE: self._combine,
            Op.OUT: self._add_projection,
            Op.GATE_UP: self._gate_up,
            Op.DOWN: self._add_projection,
            Op.LM_HEAD: self._lm_head,
            Op.SAMPLE: self._sample,
            Op.ADVANCE: self._advance,
        }

    def step(self, segments: Sequence[Segment]) -> list[Choice]:
        """Run the rows of `segments`, of distinct slots, and return a token for each that samples, in order."""
        self._segments = segments
        self._positions = torch.cat([torch.arange(s.start, s.end) for s in segments])  # (T,)
        for instruction in self.program.instructions:
            self._execute[instruction.op](instruction)
        return self._choices

    def _embed(self, instruction: Instruction) -> None:
        tokens = torch.tensor([t for s in self._segments for t in s.slot.tokens[s.start : s.end]])
        (table,) = self._named(instruction)  # (V, H)
        self._buffers["resid"] = table[tokens].float()

    def _qkv(self, instruction: Instruction) -> None:
        c = self._config
        norm, *matrices = self._named(instruction)
        x = self._rms_norm(self._buffers["resid"], norm)  # (T, H)
        weights, extras = matrices[:3], matrices[3:]
        biases = [extras.pop(0) for _ in range(3)] if c.qkv_bias else [None, None, None]
        q, k, v = (self._heads(self._linear(x, w, b)) for w, b in zip(weights, biases, strict=True))
        if c.qk_norm:
            q, k = (self._rms_norm(heads, weight) for heads, weight in zip((q, k), extras, strict=True))
        q, k = (rotate(heads, self._positions, self._frequencies) for heads in (q, k))
        self._buffers["q"] = q.to(self._dtype).flatten(1)  # (T, heads * head_dim)
        assert instruction.layer is not None
        row = 0
        for s in self._segments:
            rows = slice(row, row + s.count)
            self.kv.write(instruction.layer, s.slot.pages, s.start, k[rows].to(self._dtype), v[rows].to(self._dtype))
            row += s.count

    def _attend(self, instruction: Instruction) -> None:
        c = self._config
        assert instruction.layer is not None
        q = self._heads(self._buffers["q"])
        partials: list[Tensor] = []
        row = 0
        for s in self._segments:
            rows = slice(row, row + s.count)
            k, v = self.kv.read(instruction.layer, s.slot.pages, s.end)
            spans: list[Tensor] = []
            for first in range(0, s.end, self._span):
                of_span = slice(first, first + self._span)
                spans.append(attend(q[rows], k[of_span], v[of_span], self._positions[rows], first, c.sliding_window))
            partials.append(torch.stack(spans, dim=1).flatten(0, 1).flatten(1))  # (count * spans, heads * (dim + 2))
            row += s.count
        self._buffers["partials"] = torch.cat(partials)

    def _combine(self, _instruction: Instruction) -> None:
        c = self._config
        partials = self._buffers["partials"].view(-1, c.n_heads, c.head_dim + PARTIAL_EXTRA_COLUMNS)
        rows: list[Tensor] = []
        at = 0
        for s in self._segments:
            n_spans = -(-s.end // self._span)
            for _ in range(s.count):
                rows.append(combine(partials[at : at + n_spans]).flatten())
                at += n_spans
        self._buffers["attn"] = torch.stack(rows).to(self._dtype)  # (T, heads * head_dim)

    def _add_projection(self, instruction: Instruction) -> None:
        """OUT and DOWN: add to the residual what a matrix makes of the other buffer."""
        resid, other = (self._buffers[name] for name in instruction.reads)
        (weight,) = self._named(instruction)
        self._buffers["resid"] = resid + self._linear(other, weight)

    def _gate_up(self, instruction: Instruction) -> None:
        norm, gate, up = self._named(instruction)
        x = self._rms_norm(self._buffers["resid"], norm)
        act = functional.silu(self._linear(x, gate)) * self._linear(x, up)
        self._buffers["act"] = act.to(self._dtype)  # (T, F)

    def _lm_head(self, instruction: Instruction) -> None:
        norm, head = self._named(instruction)
        ends = torch.tensor([s.count for s in self._segments]).cumsum(0) - 1  # last row of each segment
        sampling = ends[[s.samples for s in self._segments]]
        self.logits = self._linear(self._rms_norm(self._buffers["resid"][sampling], norm), head)
        self._buffers["logits"] = self.logits.clone()  # the sampler overwrites its input

    def _sample(self, _instruction: Instruction) -> None:
        slots = [s.slot for s in self._segments if s.samples]
        self._choices = self._sampler.sample(self._buffers["logits"], slots) if slots else []

    def _advance(self, _instruction: Instruction) -> None:
        choices = iter(self._choices)
        for s in self._segments:
            self._slots.advance(s, next(choices).token if s.samples else None)

    def _named(self, instruction: Instruction) -> list[Tensor]:
        return [self._weights[name] for name in instruction.weights]

    def _heads(self, x: Tensor) -> Tensor:
        """Return (T, heads * head_dim) as (T, heads, head_dim)."""
        return x.view(len(x), -1, self._config.head_dim)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight^T + bias in f32, of operands in `dtype`. `weight` is (columns out, columns in)."""
        return functional.linear(x.to(self._dtype).float(), weight.float(), None if bias is None else bias.float())

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x / rms(x) * weight over the last dimension, f32."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config.norm_eps) * weight.float()
