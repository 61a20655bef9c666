"""bf16 and the arithmetic of instructions, in numpy. Sums are f64 rounded once, so that no order of adding shows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]


def rounded(x: NDArray[np.floating]) -> F32:
    """Return x rounded to bf16, to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def pack(x: NDArray[np.floating]) -> U32:
    """Return bf16 words of pairs of the last dimension, the first in the low half."""
    halves = (rounded(x).view(np.uint32) >> 16).astype(np.uint16)
    return halves.view(np.uint32)


def unpack(words: NDArray[np.unsignedinteger]) -> F32:
    """Return the pairs of numbers in bf16 words; the last dimension doubles."""
    halves = np.ascontiguousarray(words, dtype=np.uint32).view(np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def root_mean_square(x: NDArray[np.floating], eps: float) -> NDArray[np.float64]:
    """Return 1 / rms of the last dimension."""
    return 1.0 / np.sqrt(np.square(x, dtype=np.float64).mean(-1, keepdims=True) + eps)


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rotary embedding of (n, head_dim) at one position, Hugging Face's rotate-half convention."""
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def silu_gate(gate: F32, up: F32) -> F32:
    """Return silu(gate) * up."""
    return gate * up / (1.0 + np.exp(-gate))


Partial = tuple[
    NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]
]  # top (n,), total (n,), out (n, head_dim)


def attend(q: F32, k: F32, v: F32) -> Partial:
    """Partial attention of queries (n, head_dim) over keys and values (m, head_dim)."""
    if not len(k):
        return np.full(len(q), -1e30), np.zeros(len(q)), np.zeros((len(q), q.shape[1]))
    scores = q.astype(np.float64) @ k.T.astype(np.float64) / np.sqrt(q.shape[1])
    top = scores.max(-1)
    weights = np.exp(scores - top[:, None])
    return top, weights.sum(-1), weights @ v.astype(np.float64)


def absorb(a: Partial, b: Partial) -> Partial:
    """Merge two partial results."""
    top = np.maximum(a[0], b[0])
    keep, take = np.exp(a[0] - top), np.exp(b[0] - top)
    return top, a[1] * keep + b[1] * take, a[2] * keep[:, None] + b[2] * take[:, None]
