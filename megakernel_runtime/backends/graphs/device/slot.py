"""How kernels read a slot's fields. Must not know: what they are for."""

from __future__ import annotations

import triton
import triton.language as tl

from megakernel_runtime.device_state import fields as layout

FIELD_WORDS = tl.constexpr(layout.FIELD_WORDS)
TOKEN = tl.constexpr(layout.Field.TOKEN.value)
POSITION = tl.constexpr(layout.Field.POSITION.value)
GENERATED = tl.constexpr(layout.Field.GENERATED.value)
LIVE = tl.constexpr(layout.Field.LIVE.value)
LIMIT = tl.constexpr(layout.Field.LIMIT.value)
MIN_TOKENS = tl.constexpr(layout.Field.MIN_TOKENS.value)
BAN_UNTIL = tl.constexpr(layout.Field.BAN_UNTIL.value)
FLAGS = tl.constexpr(layout.Field.FLAGS.value)
TOP_K = tl.constexpr(layout.Field.TOP_K.value)
N_TOP = tl.constexpr(layout.Field.N_TOP.value)
SEED_LOW = tl.constexpr(layout.Field.SEED_LOW.value)
SEED_HIGH = tl.constexpr(layout.Field.SEED_HIGH.value)
TEMPERATURE = tl.constexpr(layout.Field.TEMPERATURE.value)
MIN_P = tl.constexpr(layout.Field.MIN_P.value)
REPETITION = tl.constexpr(layout.Field.REPETITION.value)
PRESENCE = tl.constexpr(layout.Field.PRESENCE.value)
FREQUENCY = tl.constexpr(layout.Field.FREQUENCY.value)
TOP_P = tl.constexpr(layout.Field.TOP_P.value)
PENALISED = tl.constexpr(layout.Flag.PENALISED.value)
BIASED = tl.constexpr(layout.Flag.BIASED.value)
RESTRICTED = tl.constexpr(layout.Flag.RESTRICTED.value)
SKIPPED = tl.constexpr(layout.Outcome.SKIPPED.value)
RUNS = tl.constexpr(layout.Outcome.RUNS.value)
STOP = tl.constexpr(layout.Outcome.STOP.value)
LENGTH = tl.constexpr(layout.Outcome.LENGTH.value)
PROMPT_COUNT = tl.constexpr(layout.PROMPT_COUNT)
MASK_BITS = tl.constexpr(layout.MASK_BITS)
ROW_WORDS = tl.constexpr(4)  # a row is: slot, token, position, whether it attends by spans


@triton.jit
def load_float(slot, field: tl.constexpr):
    """A float field of the slot whose fields start at `slot`."""
    return tl.load(slot + field).to(tl.float32, bitcast=True)


@triton.jit
def load_double(slot, field: tl.constexpr):
    """A field of two words."""
    low = tl.load(slot + field).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(slot + field + 1).to(tl.int64)
    return ((high << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def has_bit(mask, token):
    """Whether a token is in a bit mask."""
    return (tl.load(mask + token // MASK_BITS) >> (token % MASK_BITS)) & 1
