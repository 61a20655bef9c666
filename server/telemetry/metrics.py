"""The one owner of all Prometheus families, in the API process; the engine's values arrive as `Observations`.

Knows names (families.py) and values, and renders them. Must not know: routes, requests, or how the engine counts.
Used from the event loop's thread alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from server.engine.messages import Observations
from server.telemetry.families import FAMILIES, Family, Feed, Kind

disable_created_metrics()  # a *_created series for each child would double the page for nothing

logger = logging.getLogger(__name__)

Instrument = Counter | Gauge | Histogram

_FINISHED_REASON: Final = {"cancelled": "abort", "tool_calls": "stop", "content_filter": "stop"}


class Metrics:
    """All families, exposed from the start. Counters never fall, also when the engine restarts and counts from zero."""

    content_type: Final = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, model_name: str, engine: str = "0") -> None:
        self._registry = CollectorRegistry()
        self._common = (model_name, engine)
        self._families = {family.name: family for family in FAMILIES}
        self._instruments = {family.name: self._register(family) for family in FAMILIES}
        self._children: dict[tuple[str, tuple[str, ...]], Instrument] = {}
        self._seen: dict[str, float] = {}  # engine counter key -> last cumulative value
        self._unknown: set[str] = set()
        self._expose_known()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    # ---------------------------------------------------------------- fed by the engine

    def observe_engine(self, observations: Observations) -> None:
        """Take over the engine's gauges, cumulative counters and histogram samples."""
        for key, value in observations.gauges.items():
            if isinstance(child := self._engine_child(key, Kind.GAUGE), Gauge):
                child.set(value)
        for key, value in observations.counters.items():
            if isinstance(child := self._engine_child(key, Kind.COUNTER), Counter):
                child.inc(self._growth(key, value))
        for key, values in observations.samples.items():
            if isinstance(child := self._engine_child(key, Kind.HISTOGRAM), Histogram):
                for value in values:
                    child.observe(value)

    def engine_restarted(self) -> None:
        """The engine process died and is started again: its gauges no longer hold, its counts begin at zero."""
        self._seen.clear()
        self._counter("megakernel_engine_restarts_total").inc()
        for family in FAMILIES:
            if family.feed is Feed.ENGINE and family.kind is Kind.GAUGE:
                self._gauge(family.name).set(0)

    def engine_loaded(self, *, version: str, backend: str, device: str, model: str) -> None:
        """Say in megakernel_build_info what runs; the series of an earlier engine is dropped."""
        self._instruments["megakernel_build_info"].clear()
        self._children = {k: child for k, child in self._children.items() if k[0] != "megakernel_build_info"}
        self._gauge("megakernel_build_info", version, backend, device, model).set(1)

    # ---------------------------------------------------------------- fed by the API

    def ready(self, value: bool) -> None:
        """Whether requests are accepted now."""
        self._gauge("megakernel_ready").set(float(value))

    def rejected(self, reason: str) -> None:
        """Count a request refused before it was queued; `reason` as in `Rejected.reason`."""
        self._counter("megakernel_admission_rejections_total", reason).inc()

    def first_token(self, seconds: float) -> None:
        """A request's first token was sent `seconds` after its receipt."""
        self._histogram("vllm:time_to_first_token_seconds").observe(seconds)

    def inter_token(self, seconds: float) -> None:
        """A token was sent `seconds` after the one before it of the same choice."""
        self._histogram("vllm:inter_token_latency_seconds").observe(seconds)

    def delivery(self, seconds: float) -> None:
        """A token's bytes were handed to the socket `seconds` after the device had it."""
        self._histogram("megakernel_delivery_seconds").observe(seconds)

    def request_finished(
        self, *, seconds: float, prompt_tokens: int, generation_tokens: int, finish_reasons: Iterable[str]
    ) -> None:
        """A request ended: `seconds` since its receipt, tokens over all its choices, one reason for each choice."""
        self._histogram("vllm:e2e_request_latency_seconds").observe(seconds)
        self._histogram("vllm:request_prompt_tokens").observe(prompt_tokens)
        self._histogram("vllm:request_generation_tokens").observe(generation_tokens)
        for reason in finish_reasons:
            self._counter("vllm:request_success_total", _FINISHED_REASON.get(reason, reason)).inc()

    def http(self, *, handler: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request was answered. `handler` is the route's pattern, never the raw path: labels stay few."""
        self._counter("http_requests_total", handler, method, str(status)).inc()
        self._histogram("http_request_duration_seconds", handler, method).observe(seconds)

    # ---------------------------------------------------------------- out

    def render(self) -> bytes:
        """Return the page in the Prometheus text format; its media type is `content_type`."""
        return generate_latest(self._registry)

    # ---------------------------------------------------------------- inside

    def _register(self, family: Family) -> Instrument:
        labels = (*(("model_name", "engine") if family.per_model else ()), *family.labels)
        if family.kind is Kind.HISTOGRAM:
            return Histogram(family.name, family.help, labels, buckets=family.buckets, registry=self._registry)
        kind = Counter if family.kind is Kind.COUNTER else Gauge
        return kind(family.name, family.help, labels, registry=self._registry)

    def _expose_known(self) -> None:
        for family in FAMILIES:
            for values in family.known or (() if family.labels else ((),)):
                self._child(family.name, values)

    def _child(self, name: str, values: tuple[str, ...]) -> Instrument:
        """Return the series of `name` with these label values, made on first use. The cache spares a lock."""
        child = self._children.get((name, values))
        if child is None:
            labels = (*self._common, *values) if self._families[name].per_model else values
            instrument = self._instruments[name]
            child = instrument.labels(*labels) if labels else instrument
            self._children[name, values] = child
        return child

    def _counter(self, name: str, *values: str) -> Counter:
        child = self._child(name, values)
        assert isinstance(child, Counter), name
        return child

    def _gauge(self, name: str, *values: str) -> Gauge:
        child = self._child(name, values)
        assert isinstance(child, Gauge), name
        return child

    def _histogram(self, name: str, *values: str) -> Histogram:
        child = self._child(name, values)
        assert isinstance(child, Histogram), name
        return child

    def _engine_child(self, key: str, kind: Kind) -> Instrument | None:
        """Return the series that an engine key "name|value|..." names; None, logged once, if the table lacks it."""
        name, *values = key.split("|")
        family = self._families.get(name)
        if family is not None and (family.feed, family.kind, len(family.labels)) == (Feed.ENGINE, kind, len(values)):
            return self._child(name, tuple(values))
        if key not in self._unknown:
            self._unknown.add(key)
            logger.error("engine observation is not in the table of metric families", extra={"key": key, "kind": kind})
        return None

    def _growth(self, key: str, value: float) -> float:
        """Return by how much a cumulative value grew; one that fell comes from a new engine, which began at zero."""
        before = self._seen.get(key, 0.0)
        self._seen[key] = value
        return value - before if value >= before else value
