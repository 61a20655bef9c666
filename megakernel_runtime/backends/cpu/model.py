"""The program as whole operations on a CPU: each instruction is bound once to its weights, a step runs them in order.

ATTEND and COMBINE are one operation here. Rows of q and k are reordered within each head at load, from the
rotate-half convention to neighbouring pairs, so that a rotation is one multiplication of complex numbers; scores do not
change, and nobody else reads this cache. Must not know: plans, leases, sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megakernel_runtime.backends.cpu.attention import Attend, KvCache
from megakernel_runtime.backends.cpu.batch import Batch
from megakernel_runtime.backends.cpu.linear import Linear, Matrix, default_format, dense, make_linear
from megakernel_runtime.interface import Progress
from megakernel_runtime.models.config import ModelConfig
from megakernel_runtime.program.builder import build_program
from megakernel_runtime.program.isa import Instruction, Op
from megakernel_runtime.program.reference.rope import inverse_frequencies
from megakernel_runtime.weights.quantized import QuantizedTensor

_UNSET = torch.empty(0)
_length: Callable[..., Tensor] = torch.linalg.vector_norm  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


@dataclass(slots=True)
class _State:
    """What instructions of one step hand on. Buffers carry the names of the program's."""

    batch: Batch
    rotation: Tensor  # (T, heads + 2 * KV heads, head_dim / 2) complex64
    attends: tuple[Attend, ...]  # one for each group of the batch
    resid: Tensor = _UNSET  # (T, H) f32
    heads: Tensor = _UNSET  # q, then k and v, of the cache's dtype: (T, heads + 2 * KV heads, head_dim)
    attn: Tensor = _UNSET  # (T, heads * head_dim)
    act: Tensor = _UNSET  # (T, F)
    logits: Tensor = _UNSET  # (R, V) f32


_Bound = Callable[[_State], None]


class CpuModel:
    """A model's weights in one format, and its KV cache. Calling it runs the rows of a batch up to their logits."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Matrix],
        weight_format: str,
        n_pages: int,
        page_size: int,
        progress: Progress,
    ) -> None:
        """Pack the weights, telling `progress` after each instruction of the program."""
        self._config = config
        self._format = weight_format
        self.weight_bytes = 0  # read by one step
        exact = weight_format in ("fp32", "fp16")  # no rounding that the inputs of the format's matrices do not have
        self.cache = KvCache(config, n_pages, page_size, torch.float32 if exact else torch.bfloat16)
        self._eps = torch.tensor(config.norm_eps)
        self._pairs = torch.arange(config.head_dim).view(2, -1).t().reshape(-1)  # 0, d/2, 1, d/2 + 1, ...
        self._frequencies = inverse_frequencies(config)
        self._steps: list[_Bound] = []
        instructions = build_program(config).instructions
        for done, instruction in enumerate(instructions, 1):
            bound = self._bind(instruction, weights)
            if bound is not None:
                self._steps.append(bound)
            progress("pack", done, len(instructions))

    def __call__(self, batch: Batch) -> Tensor:
        """Return the logits of the rows that sample, (R, V) f32; put the keys and values of all rows into the cache."""
        state = _State(batch, self._rotation(batch.positions), tuple(map(self.cache.attend, batch.groups)))
        for step in self._steps:
            step(state)
        return state.logits

    def _rotation(self, positions: Tensor) -> Tensor:
        """Return what turns q and k to their positions and leaves v as it is, as complex factors."""
        c = self._config
        rotation = torch.ones(len(positions), c.n_heads + 2 * c.n_kv_heads, c.head_dim // 2, dtype=torch.complex64)
        angles = torch.outer(positions.double(), self._frequencies)
        rotation[:, : c.n_heads + c.n_kv_heads] = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        return rotation

    # ---------------------------------------------------------------- binding: instruction -> function of the state

    def _bind(self, instruction: Instruction, weights: Mapping[str, Matrix]) -> _Bound | None:
        """Return what executes `instruction`; None where another one has done its work, or the caller does."""
        mine = [weights[name] for name in instruction.weights]
        layer = instruction.layer or 0
        match instruction.op:
            case Op.EMBED:
                return self._bind_embed(mine[0])
            case Op.QKV:
                return self._bind_qkv(mine, layer)
            case Op.ATTEND:
                return lambda state: _attend(state, layer)
            case Op.OUT:
                linear = self._linear(mine)
                return lambda state: _add(state, linear, state.attn)
            case Op.GATE_UP:
                return self._bind_gate_up(mine)
            case Op.DOWN:
                linear = self._linear(mine)
                return lambda state: _add(state, linear, state.act)
            case Op.LM_HEAD:
                return self._bind_lm_head(mine)
            case Op.COMBINE | Op.SAMPLE | Op.ADVANCE:
                return None

    def _linear(self, parts: list[Matrix], bias: Tensor | None = None, *, weight_format: str | None = None) -> Linear:
        linear = make_linear(parts, bias, weight_format or self._format)
        self.weight_bytes += linear.nbytes
        return linear

    def _bind_embed(self, table: Matrix) -> _Bound:
        values = dense(table).to(torch.float32 if self._format == "fp32" else torch.float16)

        def embed(state: _State) -> None:
            state.resid = values[state.batch.tokens].float()

        return embed

    def _bind_qkv(self, mine: list[Matrix], layer: int) -> _Bound:
        c = self._config
        norm, matrices, rest = dense(mine[0]), mine[1:4], [dense(vector) for vector in mine[4:]]
        turned = c.n_heads + c.n_kv_heads  # heads of q and k, which stand first
        parts = [self._paired(matrices[0]), self._paired(matrices[1]), matrices[2]]
        bias = torch.cat([self._paired_rows(rest[0]), self._paired_rows(rest[1]), rest[2]]) if c.qkv_bias else None
        head_norm = None
        if c.qk_norm:
            q_norm, k_norm = (vector[self._pairs] for vector in rest[-2:])
            head_norm = torch.cat((q_norm.expand(c.n_heads, -1), k_norm.expand(c.n_kv_heads, -1)))
        linear = self._linear(parts, bias)
        cache, as_pairs = self.cache, (-1, turned + c.n_kv_heads, c.head_dim // 2, 2)
        dtype, as_heads = cache.data.dtype, (-1, turned + c.n_kv_heads, c.head_dim)

        def qkv(state: _State) -> None:
            y = linear(self._norm(state.resid, norm, linear.dtype)).float()
            if head_norm is not None:
                heads = y.view(as_heads)[:, :turned]
                heads.copy_(self._norm(heads, head_norm, torch.float32))
            torch.view_as_complex(y.view(as_pairs)).mul_(state.rotation)
            state.heads = y.view(as_heads).to(dtype)
            cache.write(layer, state.batch.places, state.heads)

        return qkv

    def _bind_gate_up(self, mine: list[Matrix]) -> _Bound:
        norm, f = dense(mine[0]), self._config.ffn_size
        linear = self._linear(mine[1:])

        def gate_up(state: _State) -> None:
            y = linear(self._norm(state.resid, norm, linear.dtype))  # (T, 2 F)
            state.act = functional.silu(y[:, :f]).mul_(y[:, f:])

        return gate_up

    def _bind_lm_head(self, mine: list[Matrix]) -> _Bound:
        norm = dense(mine[0])
        # bf16 results would make ties of logits that differ by less than 0.06
        linear = self._linear(mine[1:], weight_format="fp32" if self._format == "fp32" else default_format())

        def lm_head(state: _State) -> None:
            rows = state.batch.sampled
            resid = state.resid if rows is None else state.resid[rows]
            state.logits = linear(self._norm(resid, norm, linear.dtype))

        return lm_head

    def _paired(self, rows: Matrix) -> Matrix:
        """Return rows of q or k with each head's pairs made neighbours."""
        if isinstance(rows, QuantizedTensor):
            return QuantizedTensor(rows.kind, self._paired_rows(rows.blocks))
        return self._paired_rows(rows)

    def _paired_rows(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self._config.head_dim, *rows.shape[1:])[:, self._pairs].reshape(rows.shape)

    # ---------------------------------------------------------------- operations

    def _norm(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x / rms(x) * weight over the last dimension."""
        length = _length(x, 2, -1, True)
        inverse = torch.addcmul(self._eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        normed = (x * inverse).mul_(weight)
        return normed if dtype is torch.float32 else normed.to(dtype)


def _attend(state: _State, layer: int) -> None:
    """ATTEND and COMBINE of all groups."""
    heads, attends = state.heads, state.attends
    if len(attends) == 1:
        state.attn = attends[0](heads, layer)
    else:
        state.attn = torch.cat([attend(heads, layer) for attend in attends])


def _add(state: _State, linear: Linear, other: Tensor) -> None:
    """OUT and DOWN: add to the residual what a matrix makes of another buffer."""
    state.resid.add_(linear(other.to(linear.dtype)))
