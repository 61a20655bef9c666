"""The compile-time constants of one kernel variant: what host code computes once and device code reads as constants.

Standard library only. All sizes are element counts unless named otherwise. Must not know: weights, devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from megakernel_runtime.device_state.fields import FIELD_WORDS, MASK_BITS

WARPS = 8  # consumer warps; a tile has one sub-block for each
ROW_TILE = 16  # rows of a matrix in one tile
SUB_COLUMNS = 64  # columns of a sub-block: 128 bytes, one swizzle period
TILE_COLUMNS = WARPS * SUB_COLUMNS
TILE_BYTES = ROW_TILE * TILE_COLUMNS * 2
RESIDENT_COLUMNS = 4 * TILE_COLUMNS  # columns of one activation that the registers keep


def warp_tokens(head_dim: int) -> int:
    """Return how many tokens of a context tile a warp takes: as many as its registers hold."""
    return 32 if head_dim == 64 else 16


@dataclass(frozen=True)
class KernelShape:
    """Everything about a model, a bucket and a grid that is fixed when the kernel is compiled."""

    hidden: int
    q: int  # width of all query heads
    kv: int  # width of all key heads
    head_dim: int
    group: int  # query heads of one key head
    ffn: int
    vocab: int
    layers: int
    rows: int  # T, the token bucket: 8 or 16
    stages: int  # ring slots
    grid: int  # G, CTAs
    qk_norm: bool
    qkv_bias: bool
    window: int  # 0: none
    eps: float
    max_len: int  # positions of a slot, a multiple of `page`
    n_pages: int
    page: int = 32  # tokens of a KV page, a power of two
    slots: int = 16
    by_sm: bool = False  # CTAs are numbered by SM: the grid is all SMs of the GPU
    fresh: bool = True  # a step may have several rows of one sequence
    telemetry: bool = True  # keep time accounts
    profile: bool = False  # note when each instruction begins and ends
    drops: bool = False  # for tests: CTA 1 leaves out a signal in the step that abort[8] names, counted from 1

    @property
    def qkv(self) -> int:
        """Width of a row of raw queries, keys and values."""
        return self.q + 2 * self.kv

    @property
    def n_kv_heads(self) -> int:
        """Key heads."""
        return self.kv // self.head_dim

    @property
    def warp_tokens(self) -> int:
        """Tokens of a warp's part of a context tile."""
        return warp_tokens(self.head_dim)

    @property
    def has_short(self) -> bool:
        """Whether a matrix's operands fit the registers, to be loaded once for all its row tiles."""
        return min(self.hidden, self.q, self.ffn) <= RESIDENT_COLUMNS

    @property
    def has_long(self) -> bool:
        """Whether a matrix's operands do not fit."""
        return max(self.hidden, self.q, self.ffn) > RESIDENT_COLUMNS

    @property
    def norms_long(self) -> bool:
        """Whether such a matrix follows a norm."""
        return self.hidden > RESIDENT_COLUMNS

    @property
    def span(self) -> int:
        """Positions of a span of attention: one context tile, or more where `max_len` had over 256 spans."""
        tile = 8 * self.warp_tokens
        return max(tile, -(-self.max_len // 256 // tile) * tile)

    @property
    def max_units(self) -> int:
        """Attention units of one layer that can have partial results."""
        return self.rows * self.n_kv_heads * (-(-self.max_len // self.span) + 1)

    @property
    def max_pages(self) -> int:
        """Pages of one slot's table."""
        return self.max_len // self.page

    # The state arena, words of 32 bits: each part is (slots, width), as `device_state.state.SlotState` lays them out.
    @property
    def fields_at(self) -> int:
        """Offset of the slots' fields, FIELD_WORDS each."""
        return 0

    @property
    def pages_at(self) -> int:
        """Offset of the page tables, `max_pages` each."""
        return self.fields_at + self.slots * FIELD_WORDS

    @property
    def mask_words(self) -> int:
        """Words of a bit mask over the vocabulary."""
        return -(-self.vocab // MASK_BITS)

    @property
    def stops_at(self) -> int:
        """Offset of the masks of stop tokens."""
        return self.pages_at + self.slots * self.max_pages

    @property
    def allowed_at(self) -> int:
        """Offset of the masks of allowed tokens."""
        return self.stops_at + self.slots * self.mask_words

    @property
    def counts_at(self) -> int:
        """Offset of the token counts, `vocab` each."""
        return self.allowed_at + self.slots * self.mask_words

    @property
    def bias_at(self) -> int:
        """Offset of the fp32 biases, `vocab` each."""
        return self.counts_at + self.slots * self.vocab

    @property
    def state_words(self) -> int:
        """Words of the state arena."""
        return self.bias_at + self.slots * self.vocab

    # Activations of one step lie in one buffer: per kind, layer after layer, each (rows, width) bf16. First come the
    # residual stream's bf16 copies: layer l's input at l, the final norm's input at `layers`.
    @property
    def at_qkv(self) -> int:
        """Offset of raw queries, keys and values."""
        return (self.layers + 1) * self.rows * self.hidden

    @property
    def at_attn(self) -> int:
        """Offset of attention's output."""
        return self.at_qkv + self.layers * self.rows * self.qkv

    @property
    def at_mid(self) -> int:
        """Offset of the residual stream's bf16 copies between attention and FFN."""
        return self.at_attn + self.layers * self.rows * self.q

    @property
    def at_act(self) -> int:
        """Offset of the FFN's gated activations."""
        return self.at_mid + self.layers * self.rows * self.hidden

    @property
    def step_elements(self) -> int:
        """Elements of one step's activations; steps of even and odd number have a buffer each."""
        return self.at_act + self.layers * self.rows * self.ffn

    @property
    def partial_words(self) -> int:
        """Words of 64 bits of one layer's partial attention results; all layers and steps use the same."""
        return self.max_units * 8 * (self.head_dim + 2)
