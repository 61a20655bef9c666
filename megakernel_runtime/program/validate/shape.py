"""The numbers of a kernel variant that a program depends on. `kernels.shape.KernelShape` has them."""

from __future__ import annotations

from typing import Protocol


class Shape(Protocol):
    """Sizes are element counts unless named otherwise."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def q(self) -> int:
        """Width of all query heads."""
        ...

    @property
    def kv(self) -> int:
        """Width of all key heads."""
        ...

    @property
    def qkv(self) -> int:
        """Width of a row of raw queries, keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        ...

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        ...

    @property
    def ffn(self) -> int:
        """Width of the FFN, padded."""
        ...

    @property
    def vocab(self) -> int:
        """Tokens."""
        ...

    @property
    def layers(self) -> int:
        """Layers."""
        ...

    @property
    def rows(self) -> int:
        """Rows of a step, at most: the bucket."""
        ...

    @property
    def stages(self) -> int:
        """Slots of the weight ring."""
        ...

    @property
    def grid(self) -> int:
        """CTAs."""
        ...

    @property
    def by_sm(self) -> bool:
        """Whether CTAs are numbered by SM."""
        ...

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed."""
        ...

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        ...

    @property
    def window(self) -> int:
        """Positions that a row sees, itself included; 0: all."""
        ...

    @property
    def max_len(self) -> int:
        """Positions of a slot."""
        ...

    @property
    def page(self) -> int:
        """Tokens of a KV page."""
        ...

    @property
    def n_pages(self) -> int:
        """KV pages."""
        ...

    @property
    def max_pages(self) -> int:
        """Pages of a slot's table."""
        ...

    @property
    def slots(self) -> int:
        """Slots."""
        ...

    @property
    def span(self) -> int:
        """Positions of an attention span."""
        ...

    @property
    def max_units(self) -> int:
        """Attention units of a layer that the partial results have room for."""
        ...

    @property
    def partial_words(self) -> int:
        """Words of the partial results, 64 bits each."""
        ...

    @property
    def fields_at(self) -> int:
        """Word of the state arena where the slots' fields begin."""
        ...

    @property
    def pages_at(self) -> int:
        """Word of the state arena where the page tables begin."""
        ...

    @property
    def stops_at(self) -> int:
        """Word of the state arena where the part after the page tables begins."""
        ...

    @property
    def state_words(self) -> int:
        """Words of the state arena."""
        ...

    @property
    def at_qkv(self) -> int:
        """Element of a step's activations where layer 0's raw queries, keys and values begin."""
        ...

    @property
    def at_attn(self) -> int:
        """Element of a step's activations where layer 0's attention output begins."""
        ...

    @property
    def step_elements(self) -> int:
        """Elements of a step's activations; there are two such buffers."""
        ...
