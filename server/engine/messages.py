"""Frames between the API process and the engine process: msgspec structs in MessagePack, see wire.py.

Never pickle. Both ends are the same build of this package; `PROTOCOL_VERSION` is compared in the hello all the same.
Must not know: HTTP, text, tensors.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1


class WireSampling(msgspec.Struct, frozen=True, array_like=True):
    """`megakernel_runtime.interface.SamplingParams`, field by field (a test keeps them equal)."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    top_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 1


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """API -> engine: run `n` sequences over one prompt. Choice i samples with seed + i."""

    request_id: str  # unique on this connection, made by the API process
    prompt: tuple[int, ...]
    sampling: WireSampling
    n: int = 1
    priority: int = 0  # smaller runs first
    cache_salt: str = ""
    deadline_s: float = 0.0  # seconds from receipt; 0 = none


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """API -> engine: stop. `choice` None: the whole request. Unknown ids are ignored (they may just have finished)."""

    request_id: str
    choice: int | None = None


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine -> API, first frame after the model is loaded: what can be served."""

    version: int
    max_model_len_tokens: int
    vocab_size: int
    max_slots: int
    n_pages: int
    page_size_tokens: int
    backend: str
    device: str
    model: str
    weight_bytes: int
    kv_bytes: int


class Loading(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine -> API, before Hello: progress of one phase, for the start-up display and /ready."""

    phase: str
    done: int = 0
    total: int = 0  # 0 = unknown


class LoadFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine -> API, instead of Hello: the model cannot be served, loading again would not help. The engine ends."""

    message: str


class Fault(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine -> API: runtime or engine failed. Every request is lost, nothing more comes, the process ends."""

    message: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of one generated token; `top` falls."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine -> API: new tokens of one choice. The last event of a choice has `finish` set, exactly once."""

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # empty, or one for each token
    finish: str | None = None  # a FinishReason; "error" and "cancelled" too
    cached_prompt_tokens: int = 0  # on the first event of a choice
    device_ns: int = 0  # time.monotonic_ns scale: when the device had the last of these tokens


class Rejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine -> API: the request was not admitted to the queue, nothing of it will run."""

    request_id: str
    reason: str  # queue_full | too_long | not_ready | draining | deadline
    message: str
    retry_after_s: float = 1.0


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine -> API: the request was lost by an error of ours. No further event of it comes."""

    request_id: str
    message: str
    reason: str = "fault"  # fault | deadline (its time was over; the engine is well) | stopping


class Observations(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Engine -> API, a few times a second: gauges, cumulative counters, and histogram samples since the last one.

    Keys are metric names without labels, or name + "|" + label values joined by "|" in the metric's label order.
    """

    gauges: dict[str, float]
    counters: dict[str, float]
    samples: dict[str, list[float]]


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """API -> engine: finish what runs, admit nothing more, then exit 0."""


EngineToApi = Hello | Loading | LoadFailed | Fault | Tokens | Rejected | Failed | Observations
ApiToEngine = Submit | Cancel | Drain
