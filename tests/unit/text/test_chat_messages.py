"""Messages as clients send them become messages as templates expect them, or are refused by place and reason."""

import pytest

from server.text.chat_messages import ROLES, TemplateError, prepare_messages


def prepared(*messages, developer_role=False, parts=False):
    return prepare_messages(messages, developer_role=developer_role, parts=parts)


def content(value, **options):
    return prepared({"role": "user", "content": value}, **options)[0]["content"]


@pytest.mark.parametrize("role", ROLES)
def test_every_role_is_taken(role):
    expected = "system" if role == "developer" else role
    assert prepared({"role": role, "content": "a"})[0]["role"] == expected


def test_a_template_that_knows_developers_gets_them():
    assert prepared({"role": "developer", "content": "a"}, developer_role=True)[0]["role"] == "developer"


@pytest.mark.parametrize("role", ["robot", None, 1])
def test_other_roles_are_refused_by_place(role):
    with pytest.raises(TemplateError, match=r"messages\.1\.role is .*; supported: system, developer") as caught:
        prepared({"role": "user", "content": "a"}, {"role": role, "content": "a"})
    assert caught.value.param == "messages.1.role"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, "b", {"text": ""}], "a\nb\n"),
        (({"type": "text", "text": "a"},), "a"),
    ],
)
def test_contents_become_one_text_or_one_part(value, text):
    assert content(value) == text
    assert content(value, parts=True) == [{"type": "text", "text": text}]


@pytest.mark.parametrize("value", [1, {"text": "a"}, [{"type": "image_url"}], [None], [{"text": 1}]])
def test_other_contents_are_refused_by_place(value):
    with pytest.raises(TemplateError, match=r"messages\.0\.content must be a string, null or a list") as caught:
        content(value)
    assert caught.value.param == "messages.0.content"


def test_fields_that_are_null_are_left_out_and_others_kept():
    message = {"role": "assistant", "content": None, "name": "n", "refusal": None}
    assert prepared(message) == [{"role": "assistant", "content": "", "name": "n"}]


def test_reasoning_has_both_of_its_names():
    assert prepared({"role": "assistant", "content": "a", "reasoning": "r"})[0]["reasoning_content"] == "r"
    both = {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "c"}
    assert prepared(both)[0]["reasoning_content"] == "c"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("[1]", "[1]"), ("{", "{"), ("", ""), (None, None)],
)
def test_arguments_of_tool_calls_become_objects_where_they_are(arguments, expected):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = prepared({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"] == [{**call, "function": {"name": "f", "arguments": expected}}]
    assert call["function"]["arguments"] == arguments


def test_a_tool_call_without_a_function_is_left_to_the_template():
    assert prepared({"role": "assistant", "tool_calls": [{"id": "1"}]})[0]["tool_calls"] == [{"id": "1"}]
