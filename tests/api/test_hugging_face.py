"""The served default model answers token by token what Hugging Face's `generate` does: streamed and whole, alone and
beside others, from messages and from token ids.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.answers import N_TOKENS, greedy_answers
from tests.api.harness import texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a dozen generations in fp32 on two cores

GREEDY = {"temperature": 0, "max_tokens": N_TOKENS, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def answers(real_model_path):
    found = greedy_answers(real_model_path)
    assert len(found) >= 10
    return found


@pytest.fixture
def real(serve_real):
    return serve_real()


def messages(answer):
    return [{"role": "user", "content": answer.question}]


def test_whole_answers_side_by_side(real, answers):
    with ThreadPoolExecutor(len(answers)) as pool:  # more than there are slots: some wait
        got = list(pool.map(lambda answer: real.chat(answer.question, **GREEDY), answers))
    for mine, theirs in zip(got, answers, strict=True):
        (choice,) = mine["choices"]
        assert mine["prompt_token_ids"] == theirs.prompt
        assert choice["token_ids"] == theirs.tokens, theirs.question
        assert choice["message"]["content"] == theirs.text
        assert choice["finish_reason"] == "length"


def test_a_streamed_answer_alone(real, answers):
    answer = answers[0]
    events = real.chat_events(answer.question, **GREEDY)
    assert [i for event in events for c in event["choices"] for i in c.get("token_ids", ())] == answer.tokens
    assert texts(events) == {0: answer.text}


def test_token_ids_as_prompts_of_one_request(real, answers):
    chosen = answers[:4]
    got = real.complete([answer.prompt for answer in chosen], **GREEDY)
    assert [choice["token_ids"] for choice in got["choices"]] == [answer.tokens for answer in chosen]
