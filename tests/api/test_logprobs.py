"""Logprobs in both forms, whole and streamed: which tokens, how many alternatives, sums that cannot be."""

import math

import pytest

from tests.api.harness import END, MODEL, expect_error, ids, text_script

ANSWER = "grün!"


@pytest.fixture
def green(serve):
    return serve(text_script(ANSWER, step_seconds=0.001))


def chat_entries(served, **fields):
    whole = served.chat(logprobs=True, **fields)["choices"][0]["logprobs"]["content"]
    events = served.chat_events(logprobs=True, **fields)
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for part in parts if part for entry in part["content"]] == whole
    return whole


def test_a_chat_s_tokens(green):
    entries = chat_entries(green)
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in ANSWER.encode()]
    assert [entry["token"] for entry in entries] == ["g", "r", "\ufffd", "\ufffd", "n", "!"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert all(-1 < entry["logprob"] < 0 for entry in entries)


@pytest.mark.parametrize("top", [1, 5, 20])
def test_alternatives_fall(green, top):
    for entry in chat_entries(green, top_logprobs=top):
        alternatives = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(alternatives) == top
        assert alternatives == sorted(alternatives, reverse=True)
        assert sum(map(math.exp, alternatives)) < 1
        best = entry["top_logprobs"][0]
        assert (best["bytes"], best["logprob"]) == (entry["bytes"], entry["logprob"])  # the fake takes the best


def test_openai_s_client_reads_them(green):
    answer = green.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
    )
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2] * len(ids(ANSWER))


def test_tokens_and_text_end_at_the_same_place(green):
    """A stop string cuts both, an end token is in neither."""
    entries = chat_entries(green, stop="n")
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "grü"
    assert green.chat(logprobs=True, stop="n")["choices"][0]["message"]["content"] == "grü"


def test_a_bias_shows_in_the_logprobs(green):
    (other,) = ids("x")
    entry = chat_entries(green, logit_bias={str(other): 100}, max_tokens=1, top_logprobs=2)[0]
    assert entry["token"] == "x"
    assert entry["logprob"] > -0.001


def test_a_text_s_tokens(green):
    logprobs = green.complete(logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["g", "r", "\ufffd", "\ufffd", "n", "!"]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 4]
    assert all(-1 < value < 0 for value in logprobs["token_logprobs"])
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value
        assert 1 <= len(top) <= 2
    parts = [event["choices"][0]["logprobs"] for event in green.complete_events(logprobs=2)]
    for name, values in logprobs.items():
        assert [value for part in parts for value in part[name]] == values


def test_without_alternatives_the_chosen_token_remains(green):
    logprobs = green.complete(logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def test_special_tokens_have_logprobs_too_where_they_are_output(green):
    entries = chat_entries(green, ignore_eos=True, max_tokens=len(ids(ANSWER)) + 1, skip_special_tokens=False)
    assert entries[-1]["token"] == "<|im_end|>"
    unseen = chat_entries(green, ignore_eos=True, max_tokens=len(ids(ANSWER)) + 1)
    assert len(unseen) == len(entries)
    assert END not in ids(ANSWER)


@pytest.mark.parametrize("stream", [False, True])
def test_none_unless_asked_for(green, stream):
    if stream:
        assert all(event["choices"][0]["logprobs"] is None for event in green.chat_events())
        assert all(event["choices"][0]["logprobs"] is None for event in green.complete_events())
    else:
        assert green.chat()["choices"][0]["logprobs"] is None
        assert green.chat(logprobs=False)["choices"][0]["logprobs"] is None
        assert green.complete()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param", "code", "says"),
    [
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "invalid_value", "set logprobs to true"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "above_max_value", "at most 20"),
        ("chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "below_min_value", "at least 0"),
        ("chat/completions", {"logprobs": 5}, "logprobs", "invalid_type", "true or false"),
        ("completions", {"logprobs": 21}, "logprobs", "above_max_value", "at most 20"),
        ("completions", {"logprobs": True}, "logprobs", "invalid_type", "an integer"),
        ("completions", {"logprobs": 1, "echo": True}, "logprobs", "unsupported_parameter", "leave out one"),
    ],
)
def test_what_cannot_be_is_refused(green, path, fields, param, code, says):
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    assert says in expect_error(green.post(f"/v1/{path}", body | fields), 400, param=param, code=code)
