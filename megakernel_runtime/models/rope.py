"""Rotary embeddings as others write them down: both spellings of config.json, and GGUF's keys and frequency factors.

Must not know: how the rotation is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megakernel_runtime.models.config import RopeScaling
from megakernel_runtime.models.fields import ConfigError, Fields

_KINDS = "default, linear, llama3"


def hf_rope(fields: Fields, max_position: int) -> tuple[float, RopeScaling | None]:
    """Return base frequency and scaling. `rope_scaling` (older) goes before `rope_parameters` (transformers 5)."""
    rope = fields.group("rope_scaling")
    if not rope.values:
        rope = fields.group("rope_parameters")
    rope.only({"partial_rotary_factor": 1.0})
    theta = rope.number("rope_theta", fields.number("rope_theta"))
    kind_key = "rope_type" if rope.values.get("rope_type") is not None else "type"
    kind = rope.text(kind_key, "default")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise rope.error(next(k for k, v in rope.values.items() if isinstance(v, dict)), "one rotation for all layers")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", rope.number("factor"))
    if kind != "llama3":
        raise rope.error(kind_key, _KINDS)
    scaling = RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise rope.error("high_freq_factor", f"more than low_freq_factor, {scaling.low_freq_factor}")
    return theta, scaling


def gguf_scaling(
    fields: Fields, prefix: str, theta: float, head_dim: int, factors: Sequence[float] | None
) -> RopeScaling | None:
    """Return the scaling of a GGUF file. `factors` is its tensor rope_freqs.weight, (head_dim / 2,), if it has one.

    llama.cpp stores Llama 3.x scaling as those factors alone: the parameters are found again and must reproduce them.
    """
    kind = fields.text(prefix + "rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", fields.number(prefix + "rope.scaling.factor"))
    if kind not in {"none", "llama3"}:
        raise fields.error(prefix + "rope.scaling.type", "none, linear")
    if factors is None:
        return None
    original = fields.integer(prefix + "rope.scaling.original_context_length", 8192)
    scaling = RopeScaling("llama3", max(factors), 1.0, 4.0, original)
    if (
        len(factors) != head_dim // 2
        or not 1 <= scaling.factor < math.inf
        or not all(map(_close, factors, llama3_factors(scaling, theta, head_dim)))
    ):
        rule = f"Llama 3's rule with low and high frequency factors 1 and 4 and {original} original positions"
        raise ConfigError(f"{fields.source}: tensor 'rope_freqs.weight' holds other values than {rule}")
    return scaling


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    """Return what each of the head_dim / 2 frequencies is divided by (Llama 3.1's rule, meta-llama/llama-models)."""
    factors: list[float] = []
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    for i in range(0, head_dim, 2):
        turns = scaling.original_max_position / (2 * math.pi * theta ** (i / head_dim))  # over the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / ((1.0 - smooth) / scaling.factor + smooth))
    return factors
