"""More than can be taken, requests whose time is over, engines that die: what clients are told, and that it passes."""

import os
import signal
import threading

import openai
import pytest

from server.engine.supervisor import Supervision
from server.plan import Limits
from tests.api.harness import MODEL, VOCAB_SIZE, eventually, expect_error, ids, make_plan, parse_events, serving

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ENDLESS = {"emit": "cycle", "ids": ids("on "), "vocab_size": VOCAB_SIZE, "step_seconds": 0.002}
LONG = {"messages": HI, "max_tokens": 20_000}
SLOW_RESTART = Supervision(hang_timeout_s=10.0, first_pause_s=1.0, end_within_s=2.0)


class Streaming:
    """A stream that has begun."""

    def __init__(self, served, **fields):
        self._context = served.http.stream("POST", CHAT, json=LONG | {"stream": True} | fields)

    def __enter__(self):
        answer = self._context.__enter__()
        assert answer.status_code == 200, answer.read()
        self._pieces = answer.iter_text()
        self.text = next(self._pieces)
        return self

    def __exit__(self, *error):
        self._context.__exit__(*error)

    def rest(self):
        """All events, once the stream has ended."""
        return parse_events(self.text + "".join(self._pieces))


def in_background(ask):
    """Begin a request; return a function that waits for its answer."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()

    def wait():
        thread.join(30)
        return answers[0]

    return wait


# ---------------------------------------------------------------- overload


@pytest.fixture
def busy(tiny_path):
    """A server with one slot, which is taken, and a queue for two, which is full."""
    plan = make_plan(tiny_path, ENDLESS, spec={"max_slots": 1}, scheduler={"max_queue_requests": 2})
    with serving(plan) as served:
        with Streaming(served):
            waiting = [in_background(lambda: served.post(CHAT, LONG | {"max_tokens": 1})) for _ in range(2)]
            eventually(lambda: served.metric("vllm:num_requests_waiting") == 2)
            yield served
        assert [wait().status_code for wait in waiting] == [200, 200]  # those that were taken are served


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_retry_after(busy, stream):
    answer = busy.post(CHAT, LONG | {"stream": stream})
    assert "2 requests wait, 2 may: try again later" in expect_error(answer, 429, code="queue_full")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert 1000 <= int(answer.headers["retry-after-ms"]) <= 60_000
    assert busy.metric("megakernel_admission_rejections_total", reason="queue_full") == 1
    assert busy.metric("http_requests_total", handler=CHAT, status="429") == 1
    assert busy.metric("vllm:request_success_total", finished_reason="error") == 0
    assert busy.http.get("/ready").status_code == 200


def test_openai_s_client_is_told(busy):
    with pytest.raises(openai.RateLimitError) as caught:
        busy.openai.chat.completions.create(model=MODEL, messages=HI)
    assert caught.value.code == "queue_full"


def test_the_queue_is_bounded_by_tokens_too(serve):
    served = serve(ENDLESS, spec={"max_slots": 1}, scheduler={"max_queue_tokens": 100})
    with Streaming(served):
        first = in_background(lambda: served.post("/v1/completions", {"prompt": "x" * 80, "max_tokens": 1}))
        eventually(lambda: served.metric("vllm:num_requests_waiting") == 1)
        answer = served.post("/v1/completions", {"prompt": "x" * 30, "max_tokens": 1})
        assert "more than 100" in expect_error(answer, 429, code="queue_full")
    assert first().status_code == 200


def test_smaller_priorities_run_first(serve):
    served = serve(ENDLESS, spec={"max_slots": 1})
    done = []

    def ask(priority):
        served.complete(max_tokens=5, priority=priority)
        done.append(priority)

    with Streaming(served, max_tokens=20_000):
        threads = []
        for i, priority in enumerate((3, 0, -2, 1)):
            threads.append(threading.Thread(target=ask, args=(priority,)))
            threads[-1].start()
            eventually(lambda n=i + 1: served.metric("vllm:num_requests_waiting") == n)
    for thread in threads:
        thread.join(30)
    assert done == [-2, 0, 1, 3]


# ---------------------------------------------------------------- deadlines


def test_a_request_that_takes_too_long(serve):
    served = serve(ENDLESS, limits=Limits(request_deadline_seconds=0.3))
    answer = served.post(CHAT, LONG)
    message = expect_error(answer, 504, code="deadline_exceeded")
    assert "ask for fewer tokens" in message
    assert answer.headers["x-should-retry"] == "false"  # else OpenAI's client would wait for it twice again
    with Streaming(served) as stream:
        *events, last = stream.rest()
    assert (last["error"]["code"], last["error"]["type"]) == ("deadline_exceeded", "timeout_error")
    assert len(events) > 10
    assert served.metric("vllm:request_success_total", finished_reason="error") == 2
    served.until_idle()


# ---------------------------------------------------------------- engines that die


def test_killed_in_mid_stream(tiny_path):
    with serving(make_plan(tiny_path, ENDLESS), SLOW_RESTART) as served:
        whole = in_background(lambda: served.post(CHAT, LONG))
        with Streaming(served) as stream:
            eventually(lambda: served.engine.n_in_flight == 2)
            os.kill(served.engine.pid, signal.SIGKILL)
            *events, last = stream.rest()
        assert events
        assert set(last) == {"error"}
        assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "engine_fault")
        assert "the engine failed, try again" in last["error"]["message"]
        expect_error(whole(), 500, code="engine_fault")

        ready = served.http.get("/ready")
        refused = served.post(CHAT, {"messages": HI, "max_tokens": 1})
        for answer in (ready, refused):
            assert "started again" in expect_error(answer, 503, code="restarting")
            assert answer.headers["retry-after"] == "2"
        assert served.http.get("/live").status_code == 200
        assert served.metric("megakernel_ready") == 0

        served.wait_for("ready")
        assert served.chat(max_tokens=3)["choices"][0]["message"]["content"] == "on "
        assert served.http.get("/ready").status_code == 200
        assert served.metric("megakernel_engine_restarts_total") == 1
        assert served.metric("vllm:request_success_total", finished_reason="error") == 2


def test_openai_s_client_raises_in_mid_stream(tiny_path):
    with serving(make_plan(tiny_path, ENDLESS)) as served:
        stream = served.openai.chat.completions.create(model=MODEL, messages=HI, stream=True, max_tokens=20_000)
        assert next(stream).choices[0].delta.role == "assistant"
        os.kill(served.engine.pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)
        served.wait_for("ready")


def test_openai_s_client_waits_until_the_engine_is_back(tiny_path):
    with serving(make_plan(tiny_path, ENDLESS), SLOW_RESTART) as served:
        patient = served.client(max_retries=3)
        os.kill(served.engine.pid, signal.SIGKILL)
        served.wait_for("restarting", "ready")
        answer = patient.chat.completions.create(model=MODEL, messages=HI, max_tokens=3)
        assert answer.choices[0].message.content == "on "


def test_a_device_that_fails(tiny_path):
    with serving(make_plan(tiny_path, ENDLESS | {"fault_at_step": 20}), SLOW_RESTART) as served:
        with Streaming(served) as stream:
            *_, last = stream.rest()
        assert "scripted fault in step 20" in last["error"]["message"]
        served.wait_for("ready")
        assert served.chat(max_tokens=3)["usage"]["completion_tokens"] == 3
