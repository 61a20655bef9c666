"""The layout of a slot on the device: what its words mean, for the host that writes and the kernels that read them.

The single source of truth; device code makes its constants from it. Standard library only.
"""

from __future__ import annotations

import enum

FIELD_WORDS = 32  # 32 bit words of one slot's fields
PROMPT_COUNT = 1 << 24  # in `counts`: the token stands in the prompt; the bits below count it in the output
MASK_BITS = 32  # tokens of one word of the masks `stops` and `allowed`


class Field(enum.IntEnum):
    """Word offsets. Integers unless said otherwise."""

    TOKEN = 0  # the last token: input of the next decode step
    POSITION = 1  # of that token
    GENERATED = 2  # tokens generated so far: counter of the random stream
    LIVE = 3  # 0: finished, rows of the slot are skipped
    LIMIT = 4  # generated tokens at which the sequence is over
    MIN_TOKENS = 5  # generated tokens from which on a stop token ends the sequence
    BAN_UNTIL = 6  # generated tokens up to which stop tokens are masked out
    FLAGS = 7
    TOP_K = 8  # 0: off
    N_TOP = 9  # logprobs wanted: -1 none, 0 of the chosen token, n of the n best too
    SEED_LOW = 10
    SEED_HIGH = 11
    TEMPERATURE = 12  # f32
    MIN_P = 13  # f32
    REPETITION = 14  # f32
    PRESENCE = 15  # f32
    FREQUENCY = 16  # f32
    TOP_P = 18  # f64, two words
    ROOM = 20  # positions that the page table has room for


class Flag(enum.IntFlag):
    """Bits of Field.FLAGS: what else of a slot the sampler must read."""

    PENALISED = 1
    BIASED = 2
    RESTRICTED = 4  # to `allowed`


class Outcome(enum.IntEnum):
    """What became of a row that was to sample."""

    SKIPPED = 0  # its slot had finished before
    RUNS = 1
    STOP = 2
    LENGTH = 3
