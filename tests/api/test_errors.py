"""Every error has OpenAI's form, whoever finds it; messages say the value, the limit and the remedy."""

import json

import httpx
import openai
import pytest

from tests.api.harness import MODEL, expect_error, text_script

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture
def served(serve):
    return serve(text_script("fine"))


def raw(served, content, path=CHAT):
    return served.http.post(path, content=content, headers=JSON)


# ---------------------------------------------------------------- routes


@pytest.mark.parametrize("path", ["/", "/nowhere", "/v1", "/v1/chat", "/v1/chat/completions/", "/live/", "//live"])
def test_no_such_route(served, path):
    answer = served.http.get(served.url + path) if "chat/" not in path else served.post(path, {"messages": HI})
    message = expect_error(answer, 404, code="route_not_found")
    assert path in message
    assert "/openapi.json" in message


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("DELETE", "/live", "GET"),
        ("POST", "/v1/models", "GET"),
        ("OPTIONS", CHAT, "POST"),
    ],
)
def test_not_this_method(served, method, path, allowed):
    answer = served.http.request(method, path)
    assert f"does not answer {method}; it answers {allowed}" in expect_error(answer, 405, code="method_not_allowed")
    assert answer.headers["allow"] == allowed


def test_openai_s_client_knows_our_errors(served):
    with pytest.raises(openai.NotFoundError) as caught:
        served.openai.chat.completions.create(model="other", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.chat.completions.create(model=MODEL, messages=HI, temperature=3)
    assert caught.value.body["message"] == "temperature is 3; it must be at most 2"
    assert (caught.value.code, caught.value.param, caught.value.type) == (
        "above_max_value",
        "temperature",
        "invalid_request_error",
    )


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"hello", "not valid JSON"),
        (b"[]", "JSON but no object"),
        (b'"x"', "JSON but no object"),
        (b"null", "JSON but no object"),
        (b"{} {}", "not valid JSON"),
        (b'{"temperature": NaN}', "holds NaN"),
        (b'{"temperature": Infinity}', "holds Infinity"),
        (b'{"temperature": -Infinity}', "holds -Infinity"),
        (b'{"temperature": 1e999}', "number 1e999 is too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "has 5000 digits"),
        (b'{"user": "\xff"}', "not UTF-8: byte 10 is 0xff"),
        (b'{"user": "\\ud800"}', "half of a surrogate pair"),
        (b'{"user": {"\\udc00": 1}}', "half of a surrogate pair"),
        (b'{"n": 1, "n": 2}', "'n' is given twice"),
        (b'{"messages": [{"role": "user", "role": "system"}]}', "'role' is given twice"),
    ],
)
def test_what_is_no_json(served, content, says):
    assert says in expect_error(raw(served, content), 400, code="invalid_json")


def test_pairs_of_surrogates_are_characters(served):
    assert raw(served, b'{"messages": [{"role": "user", "content": "\\ud83d\\udc7e"}]}').status_code == 200


def nested(depth):
    """A body of this many levels, itself included."""
    return b'{"user":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b',"messages":[{"role":"user","content":"[[[{{{"}]}'


def test_depth_is_bounded(served):
    assert raw(served, nested(64)).status_code == 200
    assert "more than 64 levels" in expect_error(raw(served, nested(65)), 400, code="invalid_json")
    assert "more than 64 levels" in expect_error(raw(served, b"[" * 1_000_000), 400, code="invalid_json")


def test_brackets_in_strings_are_no_depth(served):
    text = "[{" * 500 + '\\"' + "[" * 500
    assert raw(served, json.dumps({"messages": [{"role": "user", "content": text}]}).encode()).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_bodies_are_declared_as_json(served, kind):
    """Else a page of any origin could send one without the browser asking first."""
    body = json.dumps({"messages": HI}).encode()
    answer = served.http.post(CHAT, content=body, headers={"content-type": kind} if kind else {})
    assert "send 'Content-Type: application/json'" in expect_error(answer, 415, code="unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_ways_to_say_json(served, kind):
    body = json.dumps({"messages": HI}).encode()
    assert served.http.post(CHAT, content=body, headers={"content-type": kind}).status_code == 200


# ---------------------------------------------------------------- values


WRONG = [
    ({"temperature": -0.1}, "temperature", "below_min_value", "temperature is -0.1; it must be at least 0"),
    ({"temperature": 2.1}, "temperature", "above_max_value", "temperature is 2.1; it must be at most 2"),
    ({"temperature": "1"}, "temperature", "invalid_type", 'temperature is "1"; it must be a number'),
    ({"temperature": True}, "temperature", "invalid_type", "temperature is true; it must be a number"),
    ({"top_p": 1.1}, "top_p", "above_max_value", "top_p is 1.1; it must be at most 1"),
    ({"top_p": -1}, "top_p", "below_min_value", "top_p is -1; it must be at least 0"),
    ({"top_k": -2}, "top_k", "below_min_value", "top_k is -2; it must be at least -1"),
    ({"min_p": 1.5}, "min_p", "above_max_value", "min_p is 1.5; it must be at most 1"),
    ({"presence_penalty": 2.5}, "presence_penalty", "above_max_value", "presence_penalty is 2.5; it must be at most 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "below_min_value", "frequency_penalty is -3; it must be at least -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "below_min_value", "repetition_penalty is 0; it must be at least 0.01"),
    ({"n": 0}, "n", "below_min_value", "n is 0; it must be at least 1"),
    ({"n": 129}, "n", "above_max_value", "n is 129; it must be at most 128"),
    ({"n": 1.5}, "n", "invalid_type", "n is 1.5; it must be an integer"),
    ({"seed": 2**64}, "seed", "above_max_value", "seed is 18446744073709551616; it must be less than 18446744073709551616"),
    ({"seed": 1.5}, "seed", "invalid_type", "seed is 1.5; it must be an integer"),
    ({"max_tokens": 0}, "max_tokens", "below_min_value", "max_tokens is 0; it must be at least 1"),
    ({"max_tokens": -1}, "max_tokens", "below_min_value", "max_tokens is -1; it must be at least 1"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens", "invalid_type", "it must be an integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value", "they mean the same, so give one"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value", "min_tokens is 9; it must be at most max_tokens, which is 8"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "above_max_value", "stop holds 5; it must be at most 4 strings"),
    ({"stop": ""}, "stop", "invalid_value", "stop holds an empty string"),
    ({"stop": "x" * 1025}, "stop", "above_max_value", "stop holds 1025; it must be at most 1024 characters in a string"),
    ({"stop": [1]}, "stop", "invalid_value", "stop is [1]; it must be a string or a list of strings"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "invalid_value", "it must be a list of token ids"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_value", "stop_token_ids holds token id 300; the vocabulary has ids 0 to 258"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids", "above_max_value", "holds 129; it must be at most 128 ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value", "name at least one"),
    ({"allowed_token_ids": [259]}, "allowed_token_ids", "invalid_value", "the vocabulary has ids 0 to 258"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_value", "it must be an object from token id to bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", 'logit_bias has the key "a"'),
    ({"logit_bias": {"01": 1}}, "logit_bias", "invalid_value", 'logit_bias has the key "01"'),
    ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value", "logit_bias of token 1 is 101; it must be a number from -100 to 100"),
    ({"logit_bias": {"1": None}}, "logit_bias", "invalid_value", "logit_bias of token 1 is null"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "above_max_value", "logit_bias holds 1025; it must be at most 1024 tokens"),
    ({"stream": "yes"}, "stream", "invalid_type", 'stream is "yes"; it must be true or false'),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "set stream to true"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type", "stream_options is []; it must be an object"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type", "it must be true or false"),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type", "it must be true or false"),
    ({"priority": 2**31}, "priority", "above_max_value", "it must be at most 2147483647"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value", "at least 1 character"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "invalid_value", "at most 1024 characters"),
    ({"request_id": "a b"}, "request_id", "invalid_value", 'request_id is "a b"; it must match'),
    ({"model": 1}, "model", "invalid_type", "model is 1; it must be a string"),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"], ids=["chat", "text"])
@pytest.mark.parametrize(
    ("fields", "param", "code", "says"), WRONG, ids=[",".join(case[0]) + f"-{case[3][:30]}" for case in WRONG]
)
def test_values_out_of_bounds(served, path, fields, param, code, says):
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    assert says in expect_error(served.post(path, body | fields), 400, param=param, code=code)


MESSAGES = [
    (None, "messages", "missing_required_parameter", "messages is missing"),
    ([], "messages", "invalid_value", "messages is []; it must have at least 1 item"),
    ("hi", "messages", "invalid_type", 'messages is "hi"; it must be a list'),
    (["hi"], "messages[0]", "invalid_type", 'messages[0] is "hi"; it must be an object'),
    ([{}], "messages[0].role", "missing_required_parameter", "messages[0].role is missing"),
    ([*HI, {"role": "bot", "content": ""}], "messages[1].role", "invalid_value", "messages[1].role is \"bot\"; it must be one of 'system', 'developer'"),
    ([{"role": "user"}], "messages[0].content", "missing_required_parameter", "messages[0].content is missing"),
    ([{"role": "user", "content": 1}], "messages[0].content", "invalid_value", "messages[0].content is 1; it must be a string, null or a list of text parts"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content", "invalid_value", 'has part 0 of type "image_url"; only parts of type \'text\' are supported'),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content", "invalid_value", "part 0 with text null"),
    ([{"role": "user", "content": ["hi"]}], "messages[0].content", "invalid_value", "part 0 of type null"),
    ([{"role": "user", "content": "", "name": 1}], "messages[0].name", "invalid_type", "it must be a string"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name", "missing_required_parameter", "is missing"),
    ([{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}], "messages[0].tool_calls[0].type", "invalid_value", "it must be 'function'"),
    ([{"role": "assistant", "audio": {"id": "x"}}], "messages[0].audio", "unsupported_parameter", "input other than text"),
    ([{"role": "assistant", "function_call": {"name": "x", "arguments": ""}}], "messages[0].function_call", "unsupported_parameter", "use tool_calls"),
    ([{"role": "assistant", "refusal": "no"}], "messages[0].refusal", "unsupported_parameter", "put the text into content"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "param", "code", "says"), MESSAGES, ids=[case[3][:40] for case in MESSAGES])
def test_messages_that_are_none(served, messages, param, code, says):
    assert says in expect_error(served.post(CHAT, {"messages": messages}), 400, param=param, code=code)


def test_template_flags_that_contradict(served):
    body = {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}
    for path in (CHAT, "/tokenize"):
        answer = served.post(path, body)
        assert "only one can be" in expect_error(answer, 400, param="continue_final_message", code="invalid_value")


def test_template_variables_of_ours_cannot_be_set(served):
    answer = served.post(CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}})
    assert "cannot set messages" in expect_error(answer, 400, param="chat_template_kwargs")


def test_long_values_are_cut_short_in_messages(served):
    answer = served.post(CHAT, {"messages": HI, "temperature": "x" * 100_000})
    assert len(expect_error(answer, 400, param="temperature", code="invalid_type")) < 200
    answer = served.post(CHAT, {"messages": HI, "model": "x" * 100_000})
    assert len(expect_error(answer, 404, param="model", code="model_not_found")) < 400


def test_null_is_not_given(served):
    names = ("temperature", "n", "stop", "logit_bias", "stream", "stream_options", "tools", "response_format", "seed")
    assert served.post(CHAT, {"messages": HI, **dict.fromkeys(names)}).status_code == 200


def test_unknown_fields_are_ignored(served):
    assert served.chat(a_field_of_next_month={"x": [1]})["choices"][0]["message"]["content"] == "fine"
    assert served.chat("hi", stream_options=None, extra_body={})["choices"]


# ---------------------------------------------------------------- context


def test_a_prompt_that_fills_the_context(serve):
    served = serve(text_script("state"), spec={"max_model_len_tokens": 500})
    answer = served.post("/v1/completions", {"prompt": "x" * 500})
    message = expect_error(answer, 400, param="prompt", code="context_length_exceeded")
    assert message.startswith(
        "This model's maximum context length is 500 tokens. However, your prompt resulted in 500 tokens"
    )
    assert message.endswith("Please reduce the length of the prompt to at most 499.")
    answer = served.post(CHAT, {"messages": [{"role": "user", "content": "x" * 500}]})
    assert "your messages resulted in 519 tokens" in expect_error(
        answer, 400, param="messages", code="context_length_exceeded"
    )
    with pytest.raises(openai.BadRequestError, match="maximum context length is 500 tokens"):
        served.openai.completions.create(model=MODEL, prompt="x" * 501)


def test_a_hopeless_text_is_not_cut_into_tokens(serve, monkeypatch):
    """It would take seconds, and a hundred times its memory."""
    served = serve(text_script("state"), spec={"max_model_len_tokens": 500})
    most = 500 * len("<|endoftext|>")  # the longest token
    longer = {"content": "x" * most, "role": "user"}
    assert (
        f"resulted in {most} tokens"
        in served.post("/v1/completions", {"prompt": "x" * most}).json()["error"]["message"]
    )
    monkeypatch.setattr("server.text.guarded.GuardedEncoder.encode", None)
    for path, body, param in (
        ("/v1/completions", {"prompt": "x" * (most + 1)}, "prompt"),
        ("/v1/completions", {"prompt": ["x" * (most + 1)]}, "prompt"),
        ("/tokenize", {"prompt": "é" * (2**19 + 1)}, "prompt"),
        (CHAT, {"messages": [longer]}, "messages"),
        ("/tokenize", {"messages": [{"content": "x" * 2**20, "role": "user"}]}, "messages"),
    ):
        message = expect_error(served.post(path, body), 400, param=param, code="context_length_exceeded")
        assert message.startswith("This model's maximum context length is 500 tokens. However, your ")
        looked_at = 2**20 if path == "/tokenize" else most
        assert f"bytes of text, which are more tokens; at most {looked_at} bytes are looked at." in message


def test_the_choices_of_all_prompts_are_bounded(serve):
    served = serve(text_script("fine"))
    answer = served.post("/v1/completions", {"prompt": ["a"] * 256, "n": 5, "max_tokens": 1})
    message = expect_error(answer, 400, param="n", code="above_max_value")
    assert message == "n is 5, for 256 prompts; at most 1024 choices fit into a request: split the prompts"
    assert len(served.complete(["a"] * 16, n=64, max_tokens=1)["choices"]) == 1024


def test_max_tokens_is_cut_down_to_what_is_left(serve):
    served = serve({"emit": "echo", "vocab_size": 259}, spec={"max_model_len_tokens": 100})
    usage = served.complete("x" * 90, max_tokens=10_000)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (90, 10)
    assert served.complete("x" * 99, max_tokens=10_000, min_tokens=5)["usage"]["completion_tokens"] == 1
    assert (
        served.chat(ignore_eos=True)["usage"]["total_tokens"] == 100
    )  # a conversation goes on until the context is full


# ---------------------------------------------------------------- ids and logs


@pytest.mark.parametrize("sane", ["abc-1.2_3:4", "x" * 128])
def test_a_sane_request_id_comes_back(served, sane):
    for answer in (
        served.http.get("/live", headers={"x-request-id": sane}),
        served.http.get("/nowhere", headers={"x-request-id": sane}),
        served.post(CHAT, {"messages": HI, "stream": True}, headers={"x-request-id": sane}),
    ):
        assert answer.headers.get_list("x-request-id") == [sane]


@pytest.mark.parametrize("odd", ["", "a b", "x" * 129, "a\tb", "<script>", "ä".encode()])
def test_another_one_is_replaced(served, odd):
    answer = served.http.get("/live", headers={"x-request-id": odd})
    assert answer.headers["x-request-id"] != odd
    assert len(answer.headers["x-request-id"]) == 32
    again = served.http.get("/live", headers={"x-request-id": odd})
    assert again.headers["x-request-id"] != answer.headers["x-request-id"]


def test_a_bug_is_answered_in_the_same_form(serve, monkeypatch, caplog):
    served = serve(text_script("fine"))

    def broken(*_):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("server.api.generate.chat_job", broken)
    answer = served.post(CHAT, {"messages": HI}, headers={"x-request-id": "bug-1"})
    message = expect_error(answer, 500, code="internal_error")
    assert "secret" not in message
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.request_id == "bug-1"
    assert "secret detail" in str(record.exc_info[1])


def test_a_bug_after_the_first_byte_is_told_as_an_event(serve, monkeypatch, caplog):
    served = serve(text_script("fine"))

    def broken(*_):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("server.api.chunks.ChatChunks._finish", broken)
    answer = httpx.post(f"{served.url}{CHAT}", json={"messages": HI, "stream": True}, trust_env=False)
    assert answer.status_code == 200
    last = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "secret" not in answer.text
    assert any(record.message == "stream failed" for record in caplog.records)
