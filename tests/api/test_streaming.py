"""The bytes of a stream: headers, order, silence, slow readers, clients that leave."""

import asyncio
import json
import time

import httpx
import pytest

from server.plan import Limits
from tests.api.harness import (
    END,
    MODEL,
    VOCAB_SIZE,
    eventually,
    ids,
    make_plan,
    parse_events,
    serving,
    text_script,
    texts,
)

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ENDLESS = {"emit": "cycle", "ids": ids("on and "), "vocab_size": VOCAB_SIZE}


@pytest.fixture
def served(serve):
    return serve(text_script("Hé!", step_seconds=0.001))


def raw(served, **fields):
    return served.post(CHAT, {"messages": HI, "stream": True, **fields})


def test_headers(served):
    headers = raw(served).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["transfer-encoding"] == "chunked"
    assert headers["x-request-id"]


def test_the_whole_of_a_stream(served):
    answer = raw(served, request_id="r", stream_options={"include_usage": True})
    created = parse_events(answer.text)[0]["created"]
    head = f'{{"id":"chatcmpl-r","object":"chat.completion.chunk","created":{created},"model":"{MODEL}","choices":['

    def event(choice):
        return f'data: {head}{{"index":0,{choice}}}],"usage":null}}\n\n'

    start, rest = answer.text.split("\n\n", 1)
    assert start + "\n\n" == event('"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null')
    usage = '{"prompt_tokens":21,"completion_tokens":5,"total_tokens":26,"prompt_tokens_details":{"cached_tokens":16}}'
    usage = usage.replace(":16", f":{parse_events(answer.text)[-1]['usage']['prompt_tokens_details']['cached_tokens']}")
    assert rest.endswith(
        event('"delta":{},"logprobs":null,"finish_reason":"stop"')
        + f'data: {head}],"usage":{usage}}}\n\n'
        + "data: [DONE]\n\n"
    )
    for block in rest.split("\n\n")[:-4]:
        (choice,) = json.loads(block.removeprefix("data: "))["choices"]
        assert block + "\n\n" == event(
            f'"delta":{{"content":"{choice["delta"]["content"]}"}},"logprobs":null,"finish_reason":null'
        )


def test_odd_characters_stay_one_event(serve):
    text = 'a\n\nb\r\n"\\\u2028\x00\x7f👾'
    events = serve(text_script(text)).chat_events()
    assert texts(events) == {0: text}


def test_an_error_before_the_first_token_has_its_status(serve):
    served = serve(text_script("x"), spec={"max_model_len_tokens": 30})
    answer = raw(served, messages=[{"role": "user", "content": "x" * 50}])
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_nothing_is_sent_before_the_first_token(serve):
    served = serve(text_script("late", step_seconds=0.2))
    started = time.monotonic()
    with served.http.stream("POST", CHAT, json={"messages": HI, "stream": True}) as answer:
        assert time.monotonic() - started > 0.15
        assert answer.status_code == 200
        assert parse_events("".join(answer.iter_text()))


def test_silence_is_broken_by_comments(serve):
    served = serve(text_script("slow", step_seconds=0.15), limits=Limits(keep_alive_seconds=0.05))
    answer = raw(served)
    blocks = answer.text.split("\n\n")
    comments = [block for block in blocks if block.startswith(":")]
    assert set(comments) == {": keep-alive"}
    assert 4 <= len(comments) <= 20
    assert texts(parse_events(answer.text)) == {0: "slow"}
    answer = served.openai.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == "slow"


def test_comments_come_while_text_is_held_back_too(serve):
    served = serve(text_script("ab" * 10, step_seconds=0.03), limits=Limits(keep_alive_seconds=0.1))
    answer = raw(served, stop="b" + "ab" * 10)
    assert ": keep-alive\n\n" in answer.text
    assert texts(parse_events(answer.text)) == {0: "ab" * 10}


def test_a_stream_that_flows_has_no_comments(served):
    assert "keep-alive" not in raw(served).text


# ---------------------------------------------------------------- clients that leave


def test_a_client_that_leaves_frees_its_slot(serve):
    served = serve(ENDLESS | {"step_seconds": 0.002}, spec={"max_slots": 1})
    body = {"messages": HI, "stream": True, "max_tokens": 10_000}
    with served.http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines)
    started = time.monotonic()
    assert served.chat(max_tokens=1)["choices"][0]["finish_reason"] == "length"
    assert time.monotonic() - started < 2
    assert served.metric("vllm:request_success_total", finished_reason="abort") >= 1


def test_a_client_that_does_not_stream_and_leaves_frees_its_slot_too(serve):
    served = serve(ENDLESS | {"step_seconds": 0.002}, spec={"max_slots": 1})
    before = served.metric("http_requests_total", handler="/v1/completions", status="499")
    with pytest.raises(httpx.ReadTimeout):
        served.post("/v1/completions", {"prompt": "x", "max_tokens": 10_000}, timeout=0.3)
    started = time.monotonic()
    assert served.complete(max_tokens=1)
    assert time.monotonic() - started < 2
    assert served.metric("http_requests_total", handler="/v1/completions", status="499") == before + 1


def test_a_client_that_leaves_the_queue_is_forgotten(serve):
    served = serve(ENDLESS | {"step_seconds": 0.002}, spec={"max_slots": 1})
    body = {"messages": HI, "stream": True, "max_tokens": 10_000}
    with served.http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        with pytest.raises(httpx.ReadTimeout):
            served.post(CHAT, body, timeout=0.3)
        eventually(lambda: served.engine.n_in_flight == 1)
    served.until_idle()


def test_two_hundred_that_leave_hold_up_nobody(tiny_path):
    """200 requests of 10,000 tokens, dropped after half a second: the next is answered at once."""
    script = ENDLESS | {"step_seconds": 0.002, "end_id": END}
    plan = make_plan(tiny_path, script, spec={"max_slots": 64, "max_model_len_tokens": 12_000})
    body = {"messages": HI, "stream": True, "max_tokens": 10_000}

    async def drop(client, url):
        async with client.stream("POST", url + CHAT, json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass

    async def scenario(served):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=30) as client:
            tasks = [asyncio.create_task(drop(client, served.url)) for _ in range(200)]
            await asyncio.to_thread(eventually, lambda: served.engine.n_in_flight == 200)
            done, _ = await asyncio.wait(tasks, timeout=0.5)
            assert not done
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            started = time.monotonic()
            answer = await client.post(served.url + CHAT, json={"messages": HI, "max_tokens": 4})
            seconds = time.monotonic() - started
            assert answer.json()["usage"]["completion_tokens"] == 4
            return seconds

    with serving(plan) as served:
        assert asyncio.run(scenario(served)) < 2
        served.until_idle()
        assert served.engine.n_in_flight == 0
        assert served.metric("vllm:kv_cache_usage_perc") == 0
