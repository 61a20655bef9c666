"""What a running server writes to its log: one record a request, with sizes and times; never what users wrote or read,
nor a key, however a request goes wrong and at whatever level.
"""

import json
import signal

import httpx
import pytest

from tests.api.harness import MODEL, WITHIN_S, ids, text_script

CHAT = "/v1/chat/completions"
MARK = "xyzzy"
KEY = f"sk-{MARK}"
ANSWER = f"the answer {MARK}"
HI = [{"role": "user", "content": MARK}]


@pytest.fixture
def http():
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(trust_env=False, timeout=WITHIN_S, headers=headers) as client:
        yield client


def ask_in_every_way(http, url):
    """Requests that go right and wrong, with something of the user's in each."""
    for body in (
        {"messages": [{"role": "system", "content": MARK, "name": MARK}, *HI], "user": MARK, "metadata": {MARK: MARK}},
        {"messages": HI, "stream": True, "stop": [MARK[:3] + "!"], "logprobs": True},
        {"messages": HI, "temperature": MARK},
        {"messages": HI, "model": MARK},
        {"messages": HI, "tools": [MARK]},
        {"messages": HI, "chat_template_kwargs": {"messages": MARK}},
        {"messages": MARK},
    ):
        http.post(url + CHAT, json=body)
    http.post(f"{url}/v1/completions", json={"prompt": MARK, "echo": True, "max_tokens": 30})
    http.post(f"{url}/tokenize", json={"prompt": MARK})
    http.post(f"{url}/detokenize", json={"tokens": ids(MARK)})
    http.post(url + CHAT, content=f'{{"{MARK}"', headers={"content-type": "application/json"})
    http.post(url + CHAT, content=MARK, headers={"content-type": MARK})
    http.post(url + CHAT, json={"messages": HI}, headers={"authorization": f"Bearer {MARK}-wrong"})
    http.get(f"{url}/{MARK}?{MARK}")
    http.request(MARK.upper(), url + CHAT)


@pytest.mark.parametrize("level", ["debug", "info"])
def test_nothing_of_users_and_no_key_is_logged(start, http, level):
    server = start(text_script(ANSWER), "--api-key", KEY, "--log-level", level, "--served-model-name", MODEL)
    ask_in_every_way(http, server.url)
    assert http.post(server.url + CHAT, json={"messages": HI}).json()["choices"][0]["message"]["content"] == ANSWER
    server.signal()
    assert server.exit_status() == 0
    log = server.all_of_the_log()
    assert log.count("request finished") >= 10
    assert MARK not in log
    assert MARK.upper() not in log
    assert "[withheld]" not in log  # nobody even tries


def test_an_engine_that_dies_is_no_leak_either(start, http):
    script = {"emit": "cycle", "ids": ids(MARK), "vocab_size": 259, "step_seconds": 0.01}
    server = start(script | {"fault_at_step": 5}, "--api-key", KEY, "--log-level", "debug")
    assert http.post(server.url + CHAT, json={"messages": HI}).status_code == 500
    server.event("the engine failed")
    server.signal(signal.SIGKILL)
    server.exit_status()
    assert MARK not in server.all_of_the_log()


def test_a_request_s_record(start, http):
    server = start(text_script("ok"), "--log-level", "debug", "--served-model-name", MODEL)
    http.post(server.url + CHAT, json={"messages": HI, "stream": True}, headers={"x-request-id": "mine"})
    record = server.event("request finished")
    assert (record["request_id"], record["method"], record["route"], record["status"]) == ("mine", "POST", CHAT, 200)
    assert (record["level"], record["stream"], record["cached_tokens"]) == ("info", True, 0)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (24, 3)
    assert 0 < record["first_token_seconds"] <= record["seconds"]
    http.get(f"{server.url}/live")
    record = server.event("request finished")
    assert (record["level"], record["route"]) == ("debug", "/live")  # probes ask every few seconds
    http.post(server.url + CHAT, json={})
    record = server.event("request finished")
    assert (record["status"], "prompt_tokens" in record) == (400, False)


def test_start_up_is_told_in_records(start):
    server = start(text_script("ok"), "--api-key", KEY)
    records = [json.loads(line) for line in server.log]
    assert all({"ts", "level", "logger", "event"} <= set(record) for record in records)
    assert not any(record["logger"].startswith("uvicorn") for record in records)
    assert (records[-1]["event"], records[-1]["url"]) == ("ready", server.url)
