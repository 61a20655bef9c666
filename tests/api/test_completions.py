"""/v1/completions: forms of prompts, echo, choices, streams, through OpenAI's client where it can say it."""

import pytest

from tests.api.harness import END, MODEL, VOCAB_SIZE, expect_error, finishes, ids, text_script, texts

ANSWER = ", said she."


@pytest.fixture
def said(serve):
    return serve(text_script(ANSWER, step_seconds=0.001))


@pytest.fixture
def echo(serve):
    return serve({"emit": "echo", "vocab_size": VOCAB_SIZE})


def choices(answer):
    return [choice["text"] for choice in answer["choices"]]


def test_a_whole_text(said):
    answer = said.openai.completions.create(model=MODEL, prompt="well", max_tokens=50)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, ANSWER, "stop", None)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.id.startswith("cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, len(ANSWER) + 1)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_text(said):
    stream = said.openai.completions.create(
        model=MODEL, prompt="well", max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last, usage = stream
    assert "".join(chunk.choices[0].text for chunk in (*chunks, last)) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in (*chunks, last)] == [None] * len(chunks) + ["stop"]
    assert usage.choices == []
    assert usage.usage.total_tokens == 4 + len(ANSWER) + 1
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in (*chunks, last, usage)}) == 1


def test_sixteen_tokens_unless_more_are_asked_for(echo):
    answer = echo.complete("an endless answer")
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert echo.complete("an endless answer", min_tokens=20)["usage"]["completion_tokens"] == 20
    assert echo.complete("an endless answer", max_tokens=30)["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize(
    ("prompt", "echoed"),
    [
        ("abc", ["abc"]),
        (["abc"], ["abc"]),
        (["abc", "xyz"], ["abc", "xyz"]),
        (ids("abc"), ["abc"]),
        ([ids("abc")], ["abc"]),
        ([ids("abc"), ids("xyz")], ["abc", "xyz"]),
        ("<|im_end|>", ["<|im_end|>" * 3]),
        ([END], ["<|im_end|>" * 3]),
    ],
)
def test_prompts_come_as_text_or_tokens_one_or_many(echo, prompt, echoed):
    body = {"max_tokens": 3, "ignore_eos": True, "skip_special_tokens": False}
    answer = echo.complete(prompt, **body)
    assert choices(answer) == echoed
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(echoed)))
    assert texts(echo.complete_events(prompt, **body)) == dict(enumerate(echoed))


def test_a_text_that_spells_a_control_token_is_one(echo):
    """The whole prompt is the caller's, as in vLLM: he may write control tokens."""
    assert echo.complete("<|im_end|>")["usage"]["prompt_tokens"] == 1


def test_choices_are_grouped_by_prompt(echo):
    answer = echo.complete(["ab", "xy"], n=2, max_tokens=2)
    assert choices(answer) == ["ab", "ab", "xy", "xy"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 8)
    events = echo.complete_events(["ab", "xy"], n=2, max_tokens=2)
    assert texts(events) == {0: "ab", 1: "ab", 2: "xy", 3: "xy"}
    assert finishes(events) == {index: ["length"] for index in range(4)}


def test_best_of_is_n_or_nothing(echo):
    assert len(echo.complete(n=2, best_of=2)["choices"]) == 2
    answer = echo.post("/v1/completions", {"prompt": "a", "n": 1, "best_of": 2})
    assert "best_of is 2 and n is 1" in expect_error(answer, 400, param="best_of", code="unsupported_parameter")


@pytest.mark.parametrize(
    ("prompt", "text"), [("well", "well"), (ids("well"), "well"), ([*ids("we"), END, *ids("ll")], "well")]
)
def test_echo_puts_the_prompt_before_the_text(said, prompt, text):
    whole = said.complete(prompt, echo=True, max_tokens=50)
    assert choices(whole) == [text + ANSWER]
    assert whole["usage"]["completion_tokens"] == len(ANSWER) + 1
    assert texts(said.complete_events(prompt, echo=True, max_tokens=50)) == {0: text + ANSWER}


def test_echo_shows_special_tokens_on_demand(said):
    (text,) = choices(said.complete([END], echo=True, max_tokens=2, skip_special_tokens=False))
    assert text == "<|im_end|>" + ANSWER[:2]


def test_each_echo_is_of_its_own_prompt(said):
    assert choices(said.complete(["a", "b"], n=2, echo=True, max_tokens=3)) == ["a, s", "a, s", "b, s", "b, s"]


def test_stops_look_at_the_answer_only(said):
    assert choices(said.complete("said", echo=True, stop="said", max_tokens=50)) == ["said, "]


def test_token_ids_on_demand(said):
    whole = said.complete(["a", "b"], return_token_ids=True, max_tokens=50)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [ids("a"), ids("b")]
    assert [choice["token_ids"] for choice in whole["choices"]] == [[*ids(ANSWER), END]] * 2
    got, prompts = {0: [], 1: []}, {}
    for event in said.complete_events(["a", "b"], return_token_ids=True, max_tokens=50):
        for choice in event["choices"]:
            got[choice["index"]] += choice["token_ids"]
            prompts.setdefault(choice["index"], choice.get("prompt_token_ids"))
    assert got == {0: [*ids(ANSWER), END], 1: [*ids(ANSWER), END]}
    assert prompts == {0: ids("a"), 1: ids("b")}
    assert not {"token_ids", "prompt_token_ids"} & set(said.complete()["choices"][0])


def test_a_stream_of_ids_leaves_none_out_when_text_is_held_back(said):
    events = said.complete_events(return_token_ids=True, max_tokens=50, stop="said he")
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == [*ids(ANSWER), END]


def test_request_id_and_model(said):
    answer = said.complete(request_id="mine-2", model="alias")
    assert (answer["id"], answer["model"]) == ("cmpl-mine-2", "alias")


@pytest.mark.parametrize("prompt", [[], [[]], ["a", []], ["a", 1], [1, "a"], {}, 1, [1.5], [True], [-1], [[1], 2]])
def test_what_is_no_prompt_is_refused(said, prompt):
    answer = said.post("/v1/completions", {"prompt": prompt})
    assert expect_error(answer, 400, param="prompt", code="invalid_value").startswith("prompt ")


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""], [[5], []]])
def test_an_empty_prompt_is_refused(said, prompt):
    assert "no tokens" in expect_error(
        said.post("/v1/completions", {"prompt": prompt}), 400, param="prompt", code="invalid_value"
    )


def test_ids_outside_the_vocabulary_are_refused(said):
    answer = said.post("/v1/completions", {"prompt": [5, VOCAB_SIZE]})
    message = expect_error(answer, 400, param="prompt", code="invalid_value")
    assert message == f"prompt holds token id {VOCAB_SIZE}; the vocabulary has ids 0 to {VOCAB_SIZE - 1}"
    assert said.complete([VOCAB_SIZE - 1])["usage"]["prompt_tokens"] == 1


def test_a_prompt_must_be_given(said):
    expect_error(said.post("/v1/completions", {}), 400, param="prompt", code="missing_required_parameter")


def test_not_too_many_prompts(said):
    answer = said.post("/v1/completions", {"prompt": ["a"] * 257, "max_tokens": 1})
    assert "holds 257; it must be at most 256 prompts" in expect_error(
        answer, 400, param="prompt", code="above_max_value"
    )
    assert len(said.complete(["a"] * 256, max_tokens=1)["choices"]) == 256
