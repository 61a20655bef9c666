"""Requests put together from odd values: each is answered, or refused by name; none breaks anything."""

import random

import pytest

from server.protocol import refused
from server.protocol.chat import ChatRequest
from server.protocol.completion import CompletionRequest
from tests.api.harness import text_script

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
ODD = [
    None, True, False, 0, -0.0, 1, -1, 2, 0.5, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, -(2**63), 10**39, "", "x", "\x00", "👾", "\u2028", "a" * 5000,
    "NaN", "1", "null", [], [None], [""], ["a"], [0], [0, 1], [-1], [2**40], [[]], [[0]], [[0], [1]], [["a"]], [{}], {}, {"": 0}, {"0": 1}, {"x": None}, {"type": "text"}, {"0": 1e308},
    {"include_usage": True}, {"include_usage": None}, {"continuous_usage_stats": True}, [{"role": "user", "content": [{"type": "text", "text": ""}]}], [{"role": "assistant", "content": None}],
    [{"role": "tool", "content": [], "tool_call_id": ""}], [{"role": "system"}], [{"role": ["user"]}], [{"role": "user", "content": {"type": "text"}}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
]  # fmt: skip
FIELDS = {
    CHAT: sorted({*ChatRequest.model_fields, *refused.CHAT}),
    TEXT: sorted({*CompletionRequest.model_fields, *refused.COMPLETION}),
}


@pytest.fixture
def served(serve):
    return serve(text_script("fine"), spec={"max_model_len_tokens": 200})


def expect_answer(served, path, body):
    answer = served.post(path, body)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code == 200:
        return True
    error = answer.json()["error"]
    assert error["message"]
    assert len(error["message"]) < 700
    return False


@pytest.mark.parametrize("path", FIELDS)
def test_each_field_with_each_odd_value(served, path):
    base = {"messages": HI, "max_tokens": 2} if path == CHAT else {"prompt": "hi", "max_tokens": 2}
    taken = 0
    for name in FIELDS[path]:
        taken += sum(expect_answer(served, path, base | {name: value}) for value in ODD)
    assert taken > len(FIELDS[path])


@pytest.mark.parametrize("path", FIELDS)
def test_odd_values_together(served, path):
    chosen = random.Random(5)
    base = {"messages": HI, "max_tokens": 2} if path == CHAT else {"prompt": "hi", "max_tokens": 2}
    names = [name for name in FIELDS[path] if name not in refused.CHAT | refused.COMPLETION]
    taken = 0
    for _ in range(600):
        odd = {name: chosen.choice(ODD[:22]) for name in chosen.sample(names, 3)}
        taken += expect_answer(served, path, base | odd)
    assert taken > 20
    assert served.engine.restarts == 0


def test_tokenize_and_detokenize_with_odd_values(served):
    for name in (
        "prompt",
        "messages",
        "tokens",
        "add_special_tokens",
        "return_token_strs",
        "chat_template_kwargs",
        "model",
    ):
        for value in ODD:
            for path, base in (
                ("/tokenize", {"prompt": "x"}),
                ("/tokenize", {"messages": HI}),
                ("/detokenize", {"tokens": [5]}),
            ):
                expect_answer(served, path, base | {name: value})
