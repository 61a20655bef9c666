"""The table of all metric families: name, kind, labels, buckets, who feeds it. docs/metrics.md is generated from it.

Knows names and meanings only; how values arrive is metrics.py's business. vLLM's names and labels are used where vLLM
has the metric, so that dashboards and autoscalers made for it work unchanged.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SECONDS_HOST = (
    *(1e-6, 2e-6, 5e-6, 10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6),
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)  # gaps between host and device: microseconds when all is well
SECONDS_TOKEN = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)  # one token or one step; vLLM's lowest bucket, 10 ms, lies above a whole step here
SECONDS_REQUEST = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)

GPU_STATES = ("compute", "wait_dependency", "wait_memory", "wait_host", "parked")
FINISHED_REASONS = ("stop", "length", "abort", "error")
REJECTION_REASONS = ("queue_full", "too_long", "not_ready", "draining", "deadline", "key_concurrency")


class Kind(enum.StrEnum):
    """Prometheus types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Feed(enum.StrEnum):
    """Which process observes the value."""

    ENGINE = "engine"
    API = "api"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. `labels` come after `model_name` and `engine` when `per_model`, as in vLLM."""

    name: str  # as exposed; a counter's ends in _total
    kind: Kind
    feed: Feed
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # histograms only
    per_model: bool = False
    gpu_only: bool = False  # stays at zero on the cpu backend
    known: tuple[tuple[str, ...], ...] = ()  # label values that are exposed from the start


def _vllm(name: str, kind: Kind, feed: Feed, help_text: str, buckets: tuple[float, ...] = ()) -> Family:
    return Family(f"vllm:{name}", kind, feed, help_text, buckets=buckets, per_model=True)


def _own(name: str, kind: Kind, help_text: str, *, gpu_only: bool = False, buckets: tuple[float, ...] = ()) -> Family:
    return Family(f"megakernel_{name}", kind, Feed.ENGINE, help_text, gpu_only=gpu_only, buckets=buckets)


_C, _G, _H, _E, _A = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM, Feed.ENGINE, Feed.API

_VLLM = (
    _vllm("num_requests_running", _G, _E, "Sequences that hold a slot."),
    _vllm("num_requests_waiting", _G, _E, "Sequences in the queue."),
    _vllm("kv_cache_usage_perc", _G, _E, "Share of KV pages held by live sequences, 0 to 1."),
    _vllm("prompt_tokens_total", _C, _E, "Prompt tokens of admitted sequences, cached ones included."),
    _vllm("generation_tokens_total", _C, _E, "Tokens generated."),
    Family(
        name="vllm:request_success_total",
        kind=_C,
        feed=_A,
        help="Choices that ended, by reason.",
        labels=("finished_reason",),
        per_model=True,
        known=tuple((reason,) for reason in FINISHED_REASONS),
    ),
    _vllm("num_preemptions_total", _C, _E, "Sequences put back into the queue because KV pages ran out."),
    _vllm("prefix_cache_queries_total", _C, _E, "Prompt tokens looked up in the prefix cache."),
    _vllm("prefix_cache_hits_total", _C, _E, "Prompt tokens found there, whose prefill was spared."),
    _vllm("time_to_first_token_seconds", _H, _A, "Request received to first token sent.", buckets=SECONDS_REQUEST),
    _vllm("inter_token_latency_seconds", _H, _A, "Between two tokens of a choice, at the API.", buckets=SECONDS_TOKEN),
    _vllm("e2e_request_latency_seconds", _H, _A, "Request received to last byte sent.", buckets=SECONDS_REQUEST),
    _vllm("request_queue_time_seconds", _H, _E, "Submitted to first scheduled.", buckets=SECONDS_REQUEST),
    _vllm("request_prefill_time_seconds", _H, _E, "First scheduled to first token.", buckets=SECONDS_REQUEST),
    _vllm("request_decode_time_seconds", _H, _E, "First token to last token.", buckets=SECONDS_REQUEST),
    _vllm("request_prompt_tokens", _H, _A, "Prompt tokens of a finished request.", buckets=TOKENS),
    _vllm("request_generation_tokens", _H, _A, "Tokens generated for a finished request.", buckets=TOKENS),
    _vllm("iteration_tokens_total", _H, _E, "Tokens computed in one step.", buckets=TOKENS),
)

_DEVICE = (
    Family(
        name="megakernel_gpu_seconds_total",
        kind=_C,
        feed=_E,
        help="Time by what the device did, averaged over its SMs; the cpu backend fills compute and wait_host.",
        labels=("state",),
        known=tuple((state,) for state in GPU_STATES),
    ),
    _own("idle_ratio", _G, "Share of the last window in which the device did not compute, 0 to 1."),
    _own("step_seconds", _H, "One step, on the device's clock.", buckets=SECONDS_TOKEN),
    _own("token_latency_seconds", _H, "Device time of a step for each token it generated.", buckets=SECONDS_TOKEN),
    _own("host_gap_seconds", _H, "Device ready until the next plan was there.", buckets=SECONDS_HOST),
    Family("megakernel_launches_total", _C, _E, "Kernel launches.", ("variant", "reason"), gpu_only=True),
    _own("resident", _G, "1 while the resident kernel runs.", gpu_only=True),
    Family("megakernel_steps_total", _C, _E, "Steps run, by row bucket and kind of rows.", ("bucket", "kind")),
    _own("wait_timeouts_total", _C, "Waits inside the kernel that ran into their bound.", gpu_only=True),
    Family("megakernel_fallback_total", _C, _E, "Steps or loads done by a slower path.", ("reason",)),
    _own("bandwidth_bytes_per_second", _G, "Weights and KV read from memory over the last window."),
    _own("bandwidth_ceiling_ratio", _G, "That, over the measured ceiling; 0 when not measured.", gpu_only=True),
    _own("kernels_avoided_total", _C, "Launches that kernel-per-operation would have made.", gpu_only=True),
)

_PROCESS = (
    Family(
        name="megakernel_delivery_seconds",
        kind=_H,
        feed=_A,
        help="Device had the token until its bytes were handed to the socket.",
        buckets=SECONDS_HOST,
    ),
    Family(
        name="megakernel_admission_rejections_total",
        kind=_C,
        feed=_A,
        help="Requests refused before they were queued, by reason.",
        labels=("reason",),
        known=tuple((reason,) for reason in REJECTION_REASONS),
    ),
    Family("megakernel_engine_restarts_total", _C, _A, "Times the engine process was started again after its death."),
    Family("megakernel_ready", _G, _A, "1 while requests are accepted, as /ready says."),
    Family(
        name="megakernel_build_info",
        kind=_G,
        feed=_A,
        help="Always 1; the labels say what runs.",
        labels=("version", "backend", "device", "model"),
    ),
    Family("http_requests_total", _C, _A, "HTTP requests answered.", ("handler", "method", "status")),
    Family(
        name="http_request_duration_seconds",
        kind=_H,
        feed=_A,
        help="Request received to last byte sent.",
        labels=("handler", "method"),
        buckets=SECONDS_REQUEST,
    ),
)

FAMILIES: tuple[Family, ...] = (*_VLLM, *_DEVICE, *_PROCESS)
