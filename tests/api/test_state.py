"""Routes that say how the server is and what it serves: /live, /ready, /health, /version, /metrics, /v1/models."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.telemetry.families import FAMILIES
from server.version import version
from tests.api.harness import MODEL, VOCAB_SIZE, eventually, expect_error, make_plan, serving, text_script


@pytest.fixture
def served(serve):
    return serve(text_script("state"), spec={"max_model_len_tokens": 500})


def test_before_the_model_is_loaded(tiny_path):
    plan = make_plan(tiny_path, text_script("late", load_seconds=1.0))
    with serving(plan, ready=False) as served:
        assert served.http.get("/live").json() == {"status": "live"}
        eventually(lambda: served.engine.loading is not None)
        for path in ("/ready", "/health"):
            answer = served.http.get(path)
            assert "the model is being loaded (weights" in expect_error(answer, 503, code="loading")
            assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "2000")
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            answer = served.post(path, {})
            expect_error(answer, 503, code="loading")
            assert answer.headers["retry-after"] == "2"
        assert served.metric("megakernel_ready") == 0
        assert served.metric("megakernel_admission_rejections_total", reason="not_ready") == 2
        (card, _) = served.http.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == (MODEL, None)
        served.wait_for("ready")
        assert served.http.get("/ready").json() == {"status": "ready"}
        assert served.chat()["choices"][0]["message"]["content"] == "late"
        assert served.metric("megakernel_ready") == 1


def test_a_model_that_cannot_be_loaded(tiny_path):
    plan = make_plan(tiny_path, {"model_error": "model.safetensors: truncated"})
    with serving(plan, ready=False) as served:
        served.wait_for("failed")
        answer = served.http.get("/ready")
        assert "cannot be started" in expect_error(answer, 503, code="failed")
        assert answer.headers["retry-after"] == "30"
        assert served.http.get("/live").status_code == 200
        expect_error(served.post("/v1/chat/completions", {}), 503, code="failed")


def test_health_is_empty_as_vllm_s(served):
    answer = served.http.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/version", "/metrics"])
def test_probes_may_ask_for_heads_only(served, path):
    answer = served.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_version(served):
    assert served.http.get("/version").json() == {"version": version()}


def test_models(served):
    listed = served.openai.models.list()
    assert [model.id for model in listed.data] == [MODEL, "alias"]
    assert listed.object == "list"
    alias = served.openai.models.retrieve("alias")
    assert (alias.id, alias.object, alias.owned_by) == ("alias", "model", "megakernel")
    assert (alias.max_model_len, alias.root) == (500, MODEL)
    assert alias.created == served.app.state.service.created


def test_an_unknown_model_is_told_what_is_served(served):
    for answer in (
        served.http.get("/v1/models/other"),
        served.http.get("/v1/models/"),
        served.post("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "hi"}]}),
        served.post("/v1/completions", {"model": "other", "prompt": "hi"}),
        served.post("/tokenize", {"model": "other", "prompt": "hi"}),
        served.post("/detokenize", {"model": "other", "tokens": []}),
    ):
        assert f"{MODEL}, alias" in expect_error(answer, 404, param="model", code="model_not_found")


def test_a_name_with_slashes_can_be_served(tiny_path):
    with serving(make_plan(tiny_path, served_names=("org/model",)), ready=False) as served:
        assert served.http.get("/v1/models/org/model").json()["id"] == "org/model"


def test_metrics_page(served):
    answer = served.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {family.name.removesuffix("_total") for family in FAMILIES} <= {n.removesuffix("_total") for n in names}


def test_openapi_lists_every_route(served):
    described = served.http.get("/openapi.json").json()
    assert set(described["paths"]) == {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize"),
        *("/live", "/ready", "/health", "/version", "/metrics"),
    }
    chat = described["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    for operations in described["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["default"]["content"]["application/json"]["schema"]
    schemas = described["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["temperature"]["maximum"] == 2
    assert set(schemas["Error"]["properties"]["error"]["required"]) == {"message", "type", "param", "code"}


def test_openapi_refers_to_nothing_that_is_not_there(served):
    text = served.http.get("/openapi.json").text
    described = served.http.get("/openapi.json").json()
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names
    assert names <= set(described["components"]["schemas"])


def test_the_server_closes_with_requests_running(tiny_path):
    script = {"emit": "cycle", "ids": [70], "vocab_size": VOCAB_SIZE, "step_seconds": 0.01}
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with (
        serving(make_plan(tiny_path, script)) as served,
        httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, trust_env=False) as answer,
    ):
        lines = answer.iter_lines()
        assert "assistant" in next(lines)
        served.call(served.engine.close)
        assert '"error"' in "".join(lines)
