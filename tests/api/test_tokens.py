"""/tokenize and /detokenize: the same tokens as generation sees, and back."""

import pytest

from tests.api.harness import END, FIRST_BYTE, VOCAB_SIZE, expect_error, ids, text_script


@pytest.fixture
def served(serve):
    return serve(text_script("state"), spec={"max_model_len_tokens": 500})


def tokenize(served, **body):
    answer = served.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text(served):
    assert tokenize(served, prompt="né") == {"count": 3, "max_model_len": 500, "tokens": ids("né")}
    assert tokenize(served, prompt="")["tokens"] == []


def test_strings_on_demand(served):
    assert tokenize(served, prompt="hé", return_token_strs=True)["token_strs"] == ["h", "\ufffd", "\ufffd"]


def test_a_conversation(served):
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    counted = tokenize(served, messages=messages)
    used = served.post("/v1/chat/completions", {"messages": messages, "return_token_ids": True}).json()
    assert counted["tokens"] == used["prompt_token_ids"]
    assert counted["count"] == used["usage"]["prompt_tokens"]
    assert counted["tokens"].count(END) == 1  # the template's, not the user's
    shorter = tokenize(served, messages=messages, add_generation_prompt=False)
    assert counted["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < counted["count"]


def test_the_same_as_a_prompt(served):
    used = served.complete("né <|im_start|>", return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert tokenize(served, prompt="né <|im_start|>")["tokens"] == used


def test_there_and_back(served):
    text = "Ünï <|im_end|> 👾\n"
    tokens = tokenize(served, prompt=text)["tokens"]
    assert served.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    assert served.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert served.post("/detokenize", {"tokens": [FIRST_BYTE + 0xFF]}).json() == {"prompt": "\ufffd"}


def test_a_large_text(served):
    text = "word " * 100_000
    assert tokenize(served, prompt=text)["count"] == len(text)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", None),
        ("/tokenize", {"prompt": 1}, "prompt", "invalid_type"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
            "tools",
            "unsupported_parameter",
        ),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": "a"}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens", "invalid_value"),
    ],
)
def test_what_is_wrong_is_told(served, path, body, param, code):
    expect_error(served.post(path, body), 400, param=param, code=code)
