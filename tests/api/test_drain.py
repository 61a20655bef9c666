"""`megakernel serve` as a process: SIGTERM lets running requests end, then exit code 0; a second signal does not wait."""

import signal
import threading
import time

import httpx
import pytest

from tests.api.harness import VOCAB_SIZE, WITHIN_S, eventually, expect_error, ids, parse_events, text_script, texts

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TEXT = "a good while " * 8
ENDLESS = {"emit": "cycle", "ids": ids("on "), "vocab_size": VOCAB_SIZE, "step_seconds": 0.002}


@pytest.fixture
def http():
    with httpx.Client(trust_env=False, timeout=WITHIN_S) as client:
        yield client


class Stream:
    """A stream that has begun."""

    def __init__(self, http, url, **fields):
        body = {"messages": HI, "stream": True, **fields}
        self._context = http.stream("POST", url + CHAT, json=body)

    def __enter__(self):
        self._pieces = self._context.__enter__().iter_text()
        self._text = next(self._pieces)
        return self

    def __exit__(self, *error):
        self._context.__exit__(*error)

    def rest(self):
        return parse_events(self._text + "".join(self._pieces))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_end_and_new_ones_are_refused(start, http, number):
    server = start(text_script(TEXT, step_seconds=0.01))
    with Stream(http, server.url) as stream:
        server.signal(number)
        server.event("draining")
        eventually(lambda: http.get(f"{server.url}/ready").status_code == 503)
        ready = http.get(f"{server.url}/ready")
        refused = http.post(server.url + CHAT, json={"messages": HI})
        for answer in (ready, refused):
            assert "stopping" in expect_error(answer, 503, code="draining")
            assert answer.headers["retry-after"] == "5"
        assert http.get(f"{server.url}/live").status_code == 200
        assert texts(stream.rest()) == {0: TEXT}
    assert server.exit_status() == 0


def test_an_idle_server_ends_at_once(start, http):
    server = start(text_script("x"))
    assert http.get(f"{server.url}/ready").status_code == 200  # a connection stays open
    started = time.monotonic()
    server.signal()
    assert server.exit_status() == 0
    assert time.monotonic() - started < 5


def test_what_does_not_end_in_time_is_told(start, http):
    server = start(ENDLESS, "--drain-seconds", "0.5")
    with Stream(http, server.url, max_tokens=30_000) as stream:
        server.signal()
        *events, last = stream.rest()
    assert len(events) > 50
    assert (last["error"]["code"], last["error"]["message"]) == ("draining", "the server is stopping")
    assert server.exit_status() == 0


def test_a_second_signal_does_not_wait(start, http):
    server = start(ENDLESS, "--drain-seconds", "1000")
    with Stream(http, server.url, max_tokens=30_000) as stream:
        server.signal()
        server.event("draining")
        server.signal()
        assert server.exit_status() == 0
        with pytest.raises(httpx.TransportError):  # cut off
            stream.rest()


def test_a_request_in_the_queue_is_served_before_the_end(start, http):
    server = start(text_script(TEXT, step_seconds=0.004), "--max-slots", "1")
    answers = []
    with Stream(http, server.url) as stream:
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(server.url + CHAT, json={"messages": HI}, trust_env=False))
        )
        asking.start()
        eventually(lambda: waiting(http, server.url) == 1)
        server.signal()
        assert texts(stream.rest()) == {0: TEXT}
    asking.join(WITHIN_S)
    assert answers[0].json()["choices"][0]["message"]["content"] == TEXT
    assert server.exit_status() == 0


def waiting(http, url):
    lines = http.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("vllm:num_requests_waiting{")).rsplit(" ", 1)[1])
