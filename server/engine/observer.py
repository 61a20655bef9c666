"""What the engine measures, as `Observations`: gauges, cumulative counters, bounded lists of samples.

Knows metric names (server/telemetry/families.py lists them) and where their values come from. Must not know: sockets,
Prometheus, how samples become histograms.
"""

from __future__ import annotations

import time

from megakernel_runtime.interface import Runtime, StepResult, Telemetry
from server.engine.messages import Observations
from server.scheduling.scheduler import Scheduler

BUSY_INTERVAL_S = 0.25
IDLE_INTERVAL_S = 1.0  # the sign of life while nothing happens
MAX_SAMPLES = 1024  # of one name in one frame; a full list is sent early, so none is lost

_GPU_STATES = ("compute", "wait_dependency", "wait_memory", "wait_host", "parked")


class Observer:
    """Collects between two `take` calls."""

    def __init__(self, runtime: Runtime, scheduler: Scheduler) -> None:
        self._runtime = runtime
        self._scheduler = scheduler
        self._step_seconds: list[float] = []
        self._token_seconds: list[float] = []
        self._step_tokens: list[float] = []
        self._host_gaps: list[float] = []
        self._ready_since_ns: int | None = None  # the device had done all plans while there was work left
        self._taken_at = time.monotonic()
        self._before = runtime.telemetry()

    def step(self, result: StepResult) -> None:
        """A step was done."""
        if result.n_rows == 0:
            return
        seconds = (result.ended_ns - result.started_ns) / 1e9
        self._step_seconds.append(seconds)
        self._step_tokens.append(result.n_rows)
        if result.tokens:
            self._token_seconds += [seconds] * len(result.tokens)

    def absorbed(self, ended_ns: int) -> None:
        """All results until `ended_ns` are taken over: from now on the device may wait for a plan."""
        waits = self._scheduler.n_unfinished_plans == 0 and not self._scheduler.is_idle
        self._ready_since_ns = ended_ns if waits else None

    def submitted(self) -> None:
        """A plan was submitted."""
        if self._scheduler.n_unfinished_plans > 1:
            self._host_gaps.append(0.0)
        elif self._ready_since_ns is not None:
            self._host_gaps.append(max(0, time.monotonic_ns() - self._ready_since_ns) / 1e9)
        self._ready_since_ns = None

    def due_in(self, *, busy: bool) -> float:
        """Return after how many seconds the next frame is due; zero or less: now."""
        if max(map(len, (self._step_seconds, self._token_seconds, self._host_gaps))) >= MAX_SAMPLES:
            return 0.0
        interval = BUSY_INTERVAL_S if busy else IDLE_INTERVAL_S
        return self._taken_at + interval - time.monotonic()

    def take(self) -> list[Observations]:
        """Return the state of things and the samples since the last call, in as many frames as they need."""
        now, telemetry = time.monotonic(), self._runtime.telemetry()
        gauges = self._gauges(telemetry, now - self._taken_at)
        self._taken_at, self._before = now, telemetry
        samples = self._samples()
        frames: list[Observations] = []
        while not frames or any(samples.values()):
            part = {name: values[:MAX_SAMPLES] for name, values in samples.items() if values}
            frames.append(Observations(gauges, self._counters(telemetry), part))
            samples = {name: values[MAX_SAMPLES:] for name, values in samples.items()}
        return frames

    def _samples(self) -> dict[str, list[float]]:
        queue, prefill, decode = self._scheduler.stats.take_samples()
        samples = {
            "vllm:request_queue_time_seconds": queue,
            "vllm:request_prefill_time_seconds": prefill,
            "vllm:request_decode_time_seconds": decode,
            "vllm:iteration_tokens_total": self._step_tokens,
            "megakernel_step_seconds": self._step_seconds,
            "megakernel_token_latency_seconds": self._token_seconds,
            "megakernel_host_gap_seconds": self._host_gaps,
        }
        self._step_tokens, self._step_seconds, self._token_seconds, self._host_gaps = [], [], [], []
        return samples

    def _gauges(self, telemetry: Telemetry, window_s: float) -> dict[str, float]:
        gauges, before = self._scheduler.gauges, self._before
        compute = telemetry.compute_ns - before.compute_ns
        total = sum(_state_ns(telemetry).values()) - sum(_state_ns(before).values())
        rate = (telemetry.bytes_streamed - before.bytes_streamed) / window_s if window_s > 0 else 0.0
        ceiling = telemetry.bandwidth_ceiling_bytes_per_s
        return {
            "vllm:num_requests_running": gauges.n_running,
            "vllm:num_requests_waiting": gauges.n_waiting,
            "vllm:kv_cache_usage_perc": gauges.kv_usage,
            "megakernel_idle_ratio": min(1.0, max(0.0, 1.0 - compute / total)) if total > 0 else 0.0,
            "megakernel_resident": float(telemetry.resident),
            "megakernel_bandwidth_bytes_per_second": rate,
            "megakernel_bandwidth_ceiling_ratio": rate / ceiling if ceiling > 0 else 0.0,
        }

    def _counters(self, telemetry: Telemetry) -> dict[str, float]:
        stats = self._scheduler.stats
        counters: dict[str, float] = {
            "vllm:prompt_tokens_total": stats.prompt_tokens,
            "vllm:generation_tokens_total": stats.generation_tokens,
            "vllm:num_preemptions_total": stats.preemptions,
            "vllm:prefix_cache_queries_total": stats.prefix_queries,
            "vllm:prefix_cache_hits_total": stats.prefix_hits,
            "megakernel_wait_timeouts_total": telemetry.wait_timeouts,
            "megakernel_kernels_avoided_total": telemetry.kernels_avoided,
        }
        for state, ns in _state_ns(telemetry).items():
            counters[f"megakernel_gpu_seconds_total|{state}"] = ns / 1e9
        for (variant, reason), count in telemetry.launches.items():
            counters[f"megakernel_launches_total|{variant}|{reason}"] = count
        for (bucket, kind), count in telemetry.steps.items():
            counters[f"megakernel_steps_total|{bucket}|{kind}"] = count
        for reason, count in telemetry.fallbacks.items():
            counters[f"megakernel_fallback_total|{reason}"] = count
        return counters


def _state_ns(telemetry: Telemetry) -> dict[str, int]:
    return {state: getattr(telemetry, f"{state}_ns") for state in _GPU_STATES}
