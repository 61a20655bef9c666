"""The metric page: every family from the start, parseable, and counters that survive an engine's death."""

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine.messages import Observations
from server.telemetry.families import FAMILIES, FINISHED_REASONS, GPU_STATES, Family, Feed, Kind
from server.telemetry.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("smollm2-135m")


def page(metrics):
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def value(metrics, name, **labels):
    """The one sample `name` whose labels include `labels`."""
    found = [
        sample.value
        for family in page(metrics).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def observe(metrics, *, gauges=None, counters=None, samples=None):
    metrics.observe_engine(Observations(gauges=gauges or {}, counters=counters or {}, samples=samples or {}))


def parsed_name(family: Family) -> str:
    """The text format's parser names a counter without its suffix."""
    return family.name.removesuffix("_total") if family.kind is Kind.COUNTER else family.name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_on_the_page_from_the_start(metrics, family):
    parsed = page(metrics)[parsed_name(family)]
    assert parsed.type == family.kind
    assert parsed.documentation == family.help
    for sample in parsed.samples:
        labels = set(sample.labels) - {"le"}
        assert labels == {*family.labels, *(("model_name", "engine") if family.per_model else ())}
    if not family.labels or family.known:
        assert parsed.samples, "no series is exposed before the first event"


C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
PROMISED = {  # to dashboards, autoscalers and gateways: a name, type or label that changes here breaks them
    "vllm:num_requests_running": (G, ()),
    "vllm:num_requests_waiting": (G, ()),
    "vllm:kv_cache_usage_perc": (G, ()),
    "vllm:prompt_tokens_total": (C, ()),
    "vllm:generation_tokens_total": (C, ()),
    "vllm:request_success_total": (C, ("finished_reason",)),
    "vllm:num_preemptions_total": (C, ()),
    "vllm:prefix_cache_queries_total": (C, ()),
    "vllm:prefix_cache_hits_total": (C, ()),
    "vllm:time_to_first_token_seconds": (H, ()),
    "vllm:inter_token_latency_seconds": (H, ()),
    "vllm:e2e_request_latency_seconds": (H, ()),
    "vllm:request_queue_time_seconds": (H, ()),
    "vllm:request_prefill_time_seconds": (H, ()),
    "vllm:request_decode_time_seconds": (H, ()),
    "vllm:request_prompt_tokens": (H, ()),
    "vllm:request_generation_tokens": (H, ()),
    "vllm:iteration_tokens_total": (H, ()),
    "megakernel_gpu_seconds_total": (C, ("state",)),
    "megakernel_idle_ratio": (G, ()),
    "megakernel_step_seconds": (H, ()),
    "megakernel_token_latency_seconds": (H, ()),
    "megakernel_host_gap_seconds": (H, ()),
    "megakernel_delivery_seconds": (H, ()),
    "megakernel_launches_total": (C, ("variant", "reason")),
    "megakernel_resident": (G, ()),
    "megakernel_steps_total": (C, ("bucket", "kind")),
    "megakernel_wait_timeouts_total": (C, ()),
    "megakernel_fallback_total": (C, ("reason",)),
    "megakernel_bandwidth_bytes_per_second": (G, ()),
    "megakernel_bandwidth_ceiling_ratio": (G, ()),
    "megakernel_kernels_avoided_total": (C, ()),
    "megakernel_admission_rejections_total": (C, ("reason",)),
    "megakernel_engine_restarts_total": (C, ()),
    "megakernel_ready": (G, ()),
    "megakernel_build_info": (G, ("version", "backend", "device", "model")),
    "http_requests_total": (C, ("handler", "method", "status")),
    "http_request_duration_seconds": (H, ("handler", "method")),
}


def test_all_that_is_promised_is_there():
    there = {family.name: (family.kind, family.labels) for family in FAMILIES}
    assert {name: there.get(name) for name in PROMISED} == PROMISED
    assert all(family.per_model == family.name.startswith("vllm:") for family in FAMILIES)


def test_series_with_known_labels_start_at_zero(metrics):
    for state in GPU_STATES:
        assert value(metrics, "megakernel_gpu_seconds_total", state=state) == 0
    for reason in FINISHED_REASONS:
        assert value(metrics, "vllm:request_success_total", finished_reason=reason, model_name="smollm2-135m") == 0


def test_names_are_unique_and_counters_end_in_total():
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names))
    for family in FAMILIES:
        assert family.kind is not Kind.COUNTER or family.name.endswith("_total")
        assert bool(family.buckets) == (family.kind is Kind.HISTOGRAM)
        assert list(family.buckets) == sorted(set(family.buckets))
        assert all(len(values) == len(family.labels) for values in family.known)


def test_inter_token_buckets_resolve_below_a_millisecond(metrics):
    metrics.inter_token(0.00015)
    name = "vllm:inter_token_latency_seconds_bucket"
    assert value(metrics, name, le="0.0001") == 0
    assert value(metrics, name, le="0.0002") == 1


def test_engine_values_arrive(metrics):
    observe(
        metrics,
        gauges={"vllm:num_requests_running": 3},
        counters={"vllm:generation_tokens_total": 40, "megakernel_gpu_seconds_total|compute": 1.5},
        samples={"megakernel_step_seconds": [0.001, 0.003]},
    )
    assert value(metrics, "vllm:num_requests_running", model_name="smollm2-135m", engine="0") == 3
    assert value(metrics, "vllm:generation_tokens_total") == 40
    assert value(metrics, "megakernel_gpu_seconds_total", state="compute") == 1.5
    assert value(metrics, "megakernel_step_seconds_count") == 2
    assert value(metrics, "megakernel_step_seconds_sum") == pytest.approx(0.004)


def test_cumulative_counters_grow_by_their_difference(metrics):
    for total in (10, 10, 25):
        observe(metrics, counters={"vllm:generation_tokens_total": total})
    assert value(metrics, "vllm:generation_tokens_total") == 25


@pytest.mark.parametrize("told", [True, False])
def test_counters_never_fall_when_the_engine_restarts(metrics, told):
    observe(metrics, counters={"vllm:generation_tokens_total": 100}, gauges={"vllm:num_requests_running": 5})
    if told:
        metrics.engine_restarted()
        assert value(metrics, "vllm:num_requests_running") == 0
        assert value(metrics, "megakernel_engine_restarts_total") == 1
    observe(metrics, counters={"vllm:generation_tokens_total": 7})
    assert value(metrics, "vllm:generation_tokens_total") == 107


def test_a_new_engine_that_has_overtaken_the_old_count_is_counted_whole(metrics):
    observe(metrics, counters={"vllm:generation_tokens_total": 100})
    metrics.engine_restarted()
    observe(metrics, counters={"vllm:generation_tokens_total": 150})
    assert value(metrics, "vllm:generation_tokens_total") == 250


@pytest.mark.parametrize(
    "sent",
    [
        {"gauges": {"no_such_metric": 1.0}},
        {"counters": {"vllm:num_requests_running": 1.0}},  # a gauge
        {"counters": {"megakernel_gpu_seconds_total": 1.0}},  # its label is missing
        {"counters": {"http_requests_total|/x|GET|200": 1.0}},  # the API's own
    ],
)
def test_a_value_outside_the_table_is_logged_once_and_left_out(metrics, caplog, sent):
    before = metrics.render()
    with caplog.at_level(logging.ERROR):
        observe(metrics, **sent)
        observe(metrics, **sent)
    assert len(caplog.records) == 1
    stable = [line for line in before.splitlines() if not line.startswith(b"process_")]
    assert stable == [line for line in metrics.render().splitlines() if not line.startswith(b"process_")]


def test_finished_requests(metrics):
    metrics.request_finished(
        seconds=1.2, prompt_tokens=12, generation_tokens=34, finish_reasons=["stop", "cancelled", "tool_calls"]
    )
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 1.2
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 12
    assert value(metrics, "vllm:request_generation_tokens_sum") == 34


def test_api_observations(metrics):
    metrics.http(handler="/v1/models", method="GET", status=200, seconds=0.002)
    metrics.first_token(0.2)
    metrics.delivery(0.00003)
    metrics.rejected("queue_full")
    metrics.ready(value=True)
    assert value(metrics, "http_requests_total", handler="/v1/models", method="GET", status="200") == 1
    assert value(metrics, "http_request_duration_seconds_count", handler="/v1/models") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert value(metrics, "megakernel_delivery_seconds_bucket", le="5e-05") == 1
    assert value(metrics, "megakernel_admission_rejections_total", reason="queue_full") == 1
    assert value(metrics, "megakernel_ready") == 1


def test_build_info_names_the_latest_engine_only(metrics):
    metrics.engine_loaded(version="1", backend="cpu", device="CPU, 2 threads", model="LlamaForCausalLM 135M")
    metrics.engine_loaded(version="1", backend="graphs", device="GPU", model="LlamaForCausalLM 135M")
    assert value(metrics, "megakernel_build_info") == 1
    assert value(metrics, "megakernel_build_info", backend="graphs") == 1


def test_two_instances_do_not_share_a_registry(metrics):
    Metrics("other").inter_token(0.1)
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 0


def test_feeds_split_the_table():
    assert {family.feed for family in FAMILIES} == {Feed.API, Feed.ENGINE}
