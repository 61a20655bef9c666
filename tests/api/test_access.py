"""API keys, judged on the raw path, and CORS."""

import socket

import openai
import pytest

from server.plan import Limits
from tests.api.harness import MODEL, expect_error, text_script

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
KEYS = ("sk-first", "sk-sécond")


@pytest.fixture
def guarded(serve):
    return serve(text_script("in"), api_keys=KEYS)


def with_key(key):
    return {"authorization": f"Bearer {key}"}


def raw_get(served, target):
    """The status of a GET whose target is sent byte for byte."""
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.sendall(b"GET " + target.encode() + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        with sock.makefile("rb") as answer:
            return int(answer.readline().split()[1])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/version"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
        ("OPTIONS", CHAT),
        ("POST", "/live/"),
        ("GET", "/ready/x"),
    ],
)
def test_a_key_is_needed(guarded, method, path):
    answer = guarded.http.request(method, path)
    message = expect_error(answer, 401, code="invalid_api_key")
    assert "no API key was given; send 'Authorization: Bearer <key>'" in message
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/metrics"])
def test_probes_need_none(guarded, path):
    assert guarded.http.get(path).status_code == 200


def test_metrics_can_be_guarded_too(serve):
    served = serve(text_script("in"), api_keys=KEYS, metrics_public=False)
    expect_error(served.http.get("/metrics"), 401, code="invalid_api_key")
    assert served.http.get("/metrics", headers=with_key(KEYS[0])).status_code == 200
    assert served.http.get("/live").status_code == 200


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/live", 200),
        ("/live?x=1", 200),
        ("/%6cive", 401),
        ("//live", 401),
        ("/live/../v1/models", 401),
        ("/v1/../live", 401),
        ("/metrics/../v1/models", 401),
        ("/v1/models?/live", 401),
        ("/v1/models#/live", 401),
        ("/v1%2fmodels", 401),
        ("/LIVE", 401),
    ],
)
def test_the_raw_path_decides(guarded, target, status):
    assert raw_get(guarded, target) == status


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(guarded, key):
    headers = {"authorization": f"Bearer {key}".encode()}
    assert guarded.http.get("/v1/models", headers=headers).status_code == 200
    assert guarded.http.get("/v1/models", headers={"authorization": f"bearer  {key}".encode()}).status_code == 200


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"sk-first", b"Basic sk-first", b"Bearer sk-firs", b"Bearer sk-firstx", b"Bearer \xff"],
)
def test_what_is_no_key_is_refused(guarded, value):
    answer = guarded.http.get("/v1/models", headers={"authorization": value})
    assert "the API key is wrong" in expect_error(answer, 401, code="invalid_api_key")


def test_a_wrong_key_is_told_before_the_body_is_looked_at(guarded):
    answer = guarded.http.post(CHAT, content=b"x" * 100, headers=with_key("nope"))
    expect_error(answer, 401, code="invalid_api_key")


def test_openai_s_client_with_and_without_key(guarded):
    allowed = guarded.client(api_key=KEYS[0])
    assert allowed.chat.completions.create(model=MODEL, messages=HI).choices[0].message.content == "in"
    with pytest.raises(openai.AuthenticationError) as caught:
        guarded.openai.chat.completions.create(model=MODEL, messages=HI)
    assert caught.value.code == "invalid_api_key"


def test_keys_are_neither_shown_nor_kept(guarded, caplog):
    guarded.http.get("/v1/models", headers=with_key("sk-wrong"))
    answer = guarded.http.get("/v1/models", headers=with_key(KEYS[0]))
    assert not any(key in caplog.text + answer.text + repr(guarded.plan) for key in (*KEYS, "sk-wrong"))
    guard = guarded.app.middleware_stack
    seen = []
    while (guard := getattr(guard, "app", None) or getattr(guard, "_app", None)) is not None:
        seen.append(type(guard).__name__)
        assert not any(key in repr(vars(guard)) for key in KEYS if hasattr(guard, "_hashes"))
    assert "KeyGuard" in seen


def test_no_key_is_asked_for_by_default(serve):
    assert serve(text_script("in")).http.get("/v1/models", headers=with_key("whatever")).status_code == 200


# ---------------------------------------------------------------- requests at once for one key


def test_one_key_s_requests_are_bounded(serve):
    script = {"emit": "cycle", "ids": [70], "vocab_size": 259, "step_seconds": 0.005}
    served = serve(script, api_keys=KEYS, limits=Limits(max_concurrent_per_key=2))
    body = {"prompt": "x", "max_tokens": 20_000, "stream": True}
    first, second = ({"authorization": f"Bearer {key}".encode()} for key in KEYS)
    with (
        served.http.stream("POST", "/v1/completions", json=body, headers=first) as one,
        served.http.stream("POST", "/v1/completions", json=body, headers=first) as two,
    ):
        streams = one.iter_lines(), two.iter_lines()  # kept: a stream that is let go of is closed
        assert all(next(stream).startswith("data: {") for stream in streams)
        answer = served.post("/v1/completions", {"prompt": "x"}, headers=first)
        assert "2 requests running" in expect_error(answer, 429, code="key_concurrency")
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "1000")
        assert served.post("/v1/completions", {"prompt": "x"}, headers=second).status_code == 200
    assert served.metric("megakernel_admission_rejections_total", reason="key_concurrency") == 1
    served.until_idle()
    assert served.post("/v1/completions", {"prompt": "x"}, headers=first).status_code == 200


# ---------------------------------------------------------------- CORS

ORIGIN = {"origin": "https://app.example"}


def preflight(served, origin=ORIGIN):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    return served.http.options(CHAT, headers=origin | asked)


def test_cors_is_off_by_default(serve):
    served = serve(text_script("in"))
    assert preflight(served).status_code == 405
    answer = served.http.get("/v1/models", headers=ORIGIN)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_cors_lets_the_named_origins_in(serve):
    served = serve(text_script("in"), api_keys=KEYS, cors_origins=("https://app.example",))
    answer = preflight(served)  # browsers send no key with it
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    asked = served.http.get("/v1/models", headers=ORIGIN | with_key(KEYS[0]))
    assert asked.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in asked.headers["access-control-expose-headers"]
    refused = served.http.get("/v1/models", headers=ORIGIN)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    other = {"origin": "https://evil.example"}
    assert preflight(served, other).status_code == 400
    assert "access-control-allow-origin" not in served.http.get("/live", headers=other).headers
