"""Nothing is silently ignored: every field of every request changes what is run or sent, or is refused by name, or is
accepted without effect because the contract says so. The tables below must name each field there is.
"""

import dataclasses
import inspect
import json

import openai
import openai.types.chat
import pytest

from server.api.job import chat_job, completion_job
from server.api.service import Loaded, TextSide
from server.engine.messages import Hello
from server.plan import Limits
from server.protocol import refused
from server.protocol.chat import AssistantMessage, ChatRequest, InstructionMessage, ToolMessage, UserMessage
from server.protocol.completion import CompletionRequest
from server.protocol.generation import StreamOptions
from server.protocol.parse import parse_chat, parse_completion
from server.protocol.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from server.text.chat_template import ChatTemplate, load_chat_template
from server.text.tokenizer import load_tokenizer
from tests.api.harness import VOCAB_SIZE, expect_error, ids, text_script, write_tiny_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BASE = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}}
FIXED = {"seed": 1}  # else every request differs from every other

# Field -> what is sent to see its effect. A pair: the effect beside that of its second part, which it needs.
SHARED = {
    "model": {"model": "alias"},
    "n": {"n": 2},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {"5": 1}},
    "allowed_token_ids": {"allowed_token_ids": [5, 6]},
    "seed": {"seed": 2},
    "max_tokens": {"max_tokens": 7},
    "max_completion_tokens": {"max_completion_tokens": 7},
    "min_tokens": {"min_tokens": 7},
    "stop": {"stop": "x"},
    "stop_token_ids": {"stop_token_ids": [5]},
    "ignore_eos": {"ignore_eos": True},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "stream": {"stream": True},
    "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": True}),
    "return_token_ids": {"return_token_ids": True},
    "priority": {"priority": 1},
    "cache_salt": {"cache_salt": "s"},
    "request_id": {"request_id": "r"},
}
HONOURED = {
    CHAT: SHARED
    | {
        "messages": {"messages": [{"role": "user", "content": "ho"}]},
        "add_generation_prompt": {"add_generation_prompt": False},
        "continue_final_message": {"continue_final_message": True},
        "add_special_tokens": {"add_special_tokens": True},
        "chat_template_kwargs": {"chat_template_kwargs": {"hint": "x"}},
        "logprobs": {"logprobs": True},
        "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True}),
    },
    TEXT: SHARED
    | {
        "prompt": {"prompt": "ho"},
        "echo": {"echo": True},
        "logprobs": {"logprobs": 2},
        "add_special_tokens": {"add_special_tokens": False},
    },
}
REFUSED = {
    CHAT: {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "functions": [{"name": "f"}],
        "function_call": "auto",
        "reasoning_effort": "low",
        "include_reasoning": False,
        "thinking_token_budget": 5,
        "verbosity": "low",
        "modalities": ["text", "audio"],
        "audio": {"voice": "x", "format": "wav"},
        "prediction": {"type": "content", "content": "x"},
        "web_search_options": {},
        "moderation": {"model": "x"},
        "echo": True,
        "chat_template": "{{ messages }}",
        "documents": [{"text": "x"}],
        "mm_processor_kwargs": {"x": 1},
        "media_io_kwargs": {"x": 1},
    },
    TEXT: {"best_of": 2, "suffix": "x", "prompt_embeds": "x"},
}
REFUSED_SHARED = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "x"},
    "guided_json": {},
    "guided_regex": "x",
    "guided_choice": ["x"],
    "guided_grammar": "x",
    "guided_decoding_backend": "x",
    "guided_whitespace_pattern": "x",
    "prompt_logprobs": 0,
    "bad_words": ["x"],
    "logits_processors": ["x"],
    "use_beam_search": True,
    "length_penalty": 0.5,
    "early_stopping": True,
    "truncate_prompt_tokens": 5,
    "spaces_between_special_tokens": False,
    "return_tokens_as_token_ids": True,
    "kv_transfer_params": {},
    "vllm_xargs": {"x": 1},
}
ACCEPTED = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "u",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"x": 1},
}
PROBED = {CHAT: {"response_format": {"type": "json_schema", "json_schema": {}}, "tool_choice": "required"}, TEXT: {}}


def all_refused(path):
    return REFUSED_SHARED | REFUSED[path]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    tokenizer = load_tokenizer(write_tiny_model(tmp_path_factory.mktemp("bos"), bos=True))
    hello = Hello(1, 1000, VOCAB_SIZE, 4, 100, 16, "fake", "none", "none", 0, 0)
    return Loaded(TextSide(tokenizer, load_chat_template(tokenizer)), hello)


def outcome(loaded, path, fields):
    """All that a request decides: what the engine runs, how its tokens become text, what is sent."""
    body = json.dumps(BASE[path] | FIXED | fields).encode()
    parse, make = (parse_chat, chat_job) if path == CHAT else (parse_completion, completion_job)
    request = parse(body, Limits())
    job = make(request, loaded, Limits())
    return (
        [(s.prompt, s.sampling, s.n, s.priority, s.cache_salt, s.deadline_s) for s in job.submits],
        [getattr(job, field.name) for field in dataclasses.fields(job) if field.name not in ("id", "submits")],
        job.id if "request_id" in fields else None,
        (request.model, request.stream, request.stream_options or StreamOptions(), request.return_token_ids),
    )


def cases(table):
    return [(path, name) for path, names in table.items() for name in names]


@pytest.mark.parametrize(("path", "name"), cases(HONOURED))
def test_honoured_fields_change_what_is_done(loaded, path, name):
    sent = HONOURED[path][name]
    with_it, without = sent if isinstance(sent, tuple) else (sent, {})
    assert name in with_it
    assert outcome(loaded, path, with_it) != outcome(loaded, path, without)


@pytest.mark.parametrize(("path", "name"), cases({path: all_refused(path) for path in BASE}))
def test_refused_fields_are_named(serve, path, name):
    served = serve(text_script("fine"))
    answer = served.post(path, BASE[path] | {name: all_refused(path)[name]})
    message = expect_error(answer, 400, param=name, code="unsupported_parameter")
    assert message.startswith(name)
    assert "leave it out" in message


@pytest.mark.parametrize(("path", "name"), cases(PROBED))
def test_further_values_that_are_refused(serve, path, name):
    answer = serve(text_script("fine")).post(path, BASE[path] | {name: PROBED[path][name]})
    expect_error(answer, 400, param=name, code="unsupported_parameter")


@pytest.mark.parametrize("path", BASE)
def test_values_that_ask_for_nothing_are_let_through(serve, path):
    table = refused.CHAT if path == CHAT else refused.COMPLETION
    served, seen = serve(text_script("fine")), 0
    for name, refusal in table.items():
        for value in refusal.neutral:
            answer = served.post(path, BASE[path] | {name: value})
            assert answer.status_code == 200, (name, value, answer.text)
            seen += 1
        assert served.post(path, BASE[path] | {name: None}).status_code == 200
    assert seen > 10


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_fields_change_nothing(loaded, serve, path, name):
    sent = {name: ACCEPTED[name]}
    assert outcome(loaded, path, sent) == outcome(loaded, path, {})
    assert serve(text_script("fine")).post(path, BASE[path] | sent).status_code == 200


@pytest.mark.parametrize(
    ("path", "model", "table"), [(CHAT, ChatRequest, refused.CHAT), (TEXT, CompletionRequest, refused.COMPLETION)]
)
def test_the_tables_name_each_field_once(path, model, table):
    honoured, told, accepted = set(HONOURED[path]), set(all_refused(path)), set(ACCEPTED)
    assert not honoured & told
    assert not accepted & (honoured | told)
    assert set(model.model_fields) | set(table) == honoured | told | accepted


def test_openai_s_client_can_send_nothing_unknown():
    client = openai.OpenAI(api_key="x")
    transport = {"extra_headers", "extra_query", "extra_body", "timeout"}
    for method, path in ((client.chat.completions.create, CHAT), (client.completions.create, TEXT)):
        sent = set(inspect.signature(method).parameters) - transport
        assert sent <= set(HONOURED[path]) | set(all_refused(path)) | set(ACCEPTED)


CONTRACT = [
    "model",
    "messages",
    "n",
    "stop",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "seed",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "max_completion_tokens",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
    "service_tier",
    "reasoning_effort",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "priority",
    "cache_salt",
    "prompt_logprobs",
    "return_token_ids",
    "structured_outputs",
    "request_id",
    "echo",
]


def test_the_fields_of_the_documented_contract_are_known():
    assert set(CONTRACT) <= set(HONOURED[CHAT]) | set(all_refused(CHAT)) | set(ACCEPTED)
    assert {"prompt", "best_of", "suffix"} <= set(HONOURED[TEXT]) | set(all_refused(TEXT))


# ---------------------------------------------------------------- nested fields


def test_stream_options(serve):
    served = serve(text_script("fine"))
    known = set(StreamOptions.model_fields) | set(refused.STREAM_OPTIONS)
    sent = set(openai.types.chat.ChatCompletionStreamOptionsParam.__annotations__)
    assert sent <= known == {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    plain, last, every = (
        served.chat_events(stream_options=options)
        for options in ({}, {"include_usage": True}, {"continuous_usage_stats": True, "include_obfuscation": False})
    )
    assert not any("usage" in event for event in plain)
    assert [event["usage"] is not None for event in last] == [False] * (len(last) - 1) + [True]
    assert all(event["usage"] for event in every)
    body = BASE[CHAT] | {"stream": True, "stream_options": {"include_obfuscation": True}}
    expect_error(served.post(CHAT, body), 400, param="stream_options.include_obfuscation", code="unsupported_parameter")


SHOWN = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.name }}|{{ m.tool_call_id }}|{{ m.reasoning_content }}|"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %}]{% endfor %}"
)


def test_every_field_of_a_message_reaches_the_template(loaded):
    messages = [
        {"role": "developer", "content": "d", "name": "op"},
        {"role": "user", "content": "u", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "name": "bot",
            "reasoning_content": "so",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}],
        },
        {"role": "assistant", "content": "a", "reasoning": "thus"},
        {"role": "tool", "content": "t", "tool_call_id": "c1", "name": "f"},
    ]
    template = ChatTemplate(SHOWN, texts={}, control=())
    request = parse_chat(json.dumps({"messages": messages}).encode(), Limits())
    job = chat_job(request, Loaded(TextSide(loaded.text.tokenizer, template), loaded.hello), Limits())
    shown = loaded.text.tokenizer.decode(job.submits[0].prompt, skip_special=False)
    assert shown == ("[system|d|op|||][user|u|Ann|||][assistant||bot||so|c1:f(5)][assistant|a|||thus|][tool|t|f|c1||]")


def test_the_tables_of_messages_are_complete():
    known = {
        "System": InstructionMessage,
        "Developer": InstructionMessage,
        "User": UserMessage,
        "Assistant": AssistantMessage,
        "Tool": ToolMessage,
    }
    for role, model in known.items():
        sent = getattr(openai.types.chat, f"ChatCompletion{role}MessageParam").__annotations__
        assert set(sent) <= set(model.model_fields) | set(refused.MESSAGE)


def test_tokenize_s_fields(serve, tmp_path_factory):
    """Each of its fields changes the answer, or is refused as generation refuses it."""
    bos = serve(text_script("fine"), model_path=write_tiny_model(tmp_path_factory.mktemp("bos"), bos=True))

    def answer(path, **body):
        sent = bos.post(path, body)
        assert sent.status_code == 200, sent.text
        return sent.json()

    text = {"prompt": {"prompt": "ho"}, "add_special_tokens": {"add_special_tokens": False}}
    chat = {name: HONOURED[CHAT][name] for name in set(TokenizeChatRequest.model_fields) & set(HONOURED[CHAT])}
    chat.pop("model")
    both = {"return_token_strs": {"return_token_strs": True}}
    assert set(text | both) | {"model"} == set(TokenizeTextRequest.model_fields)
    assert set(chat | both) | {"model"} == set(TokenizeChatRequest.model_fields)
    for fields in (text | both).values():
        assert answer("/tokenize", **({"prompt": "hi"} | fields)) != answer("/tokenize", prompt="hi")
    for fields in (chat | both).values():
        assert answer("/tokenize", **({"messages": HI} | fields)) != answer("/tokenize", messages=HI)
    for name in refused.TOKENIZE:
        body = {"messages": HI, name: REFUSED[CHAT][name]}
        expect_error(bos.post("/tokenize", body), 400, param=name, code="unsupported_parameter")
    assert set(DetokenizeRequest.model_fields) == {"model", "tokens"}
    assert answer("/detokenize", tokens=ids("a")) != answer("/detokenize", tokens=ids("b"))
