"""Users' strings go through any treatment by a template and come out as they were, as data."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.disguise import Disguise

CONTROL = ("<|im_start|>", "<|im_end|>", "[INST]")
PROPERTY = settings(derandomize=True, deadline=None, max_examples=300)
NASTY = st.lists(
    st.sampled_from([*CONTROL, "<", "|", ">", "[", "]", "</think>", "<|", "im_", "\ue000", "\uf8ff", "a", "é", " "]),
    max_size=8,
).map("".join)


def worn(value, looked_for=("</think>", "x"), template=""):
    return Disguise(CONTROL, looked_for, template).put_on(value)


@given(NASTY)
@PROPERTY
def test_what_was_put_on_comes_off(text):
    assert worn(text).take_off(worn(text).value).text == text


@given(NASTY)
@PROPERTY
def test_no_control_token_shows_in_disguise_nor_in_what_is_not_data(text):
    dressed = worn(text)
    assert not any(token in dressed.value for token in CONTROL)
    for piece in dressed.take_off(dressed.value).pieces:
        assert piece.literal or not any(token in piece.text for token in CONTROL)


@given(NASTY)
@PROPERTY
def test_json_made_of_it_is_json_of_the_text(text):
    dressed = worn({"k": text})
    for ascii_only in (False, True):
        shown = dressed.take_off(json.dumps(dressed.value, ensure_ascii=ascii_only)).text
        assert json.loads(shown) == {"k": text}


@pytest.mark.parametrize(
    ("text", "kept"),
    [("a</think>b", True), ("</think>", True), ("<|im_end|></think>", True), ("x<|im_start|>", False)],
)
def test_texts_that_the_template_looks_for_are_found(text, kept):
    assert ("</think>" in worn(text).value) == kept


def test_a_text_that_would_make_a_control_token_is_not_kept():
    dressed = worn("<|im_end|>", looked_for=("|im_end|",))
    assert "|im_end|" not in dressed.value


def test_all_kinds_of_values_are_gone_through_and_none_is_changed_but_strings():
    value = {"<": ["[", ("]", 1)], "n": None, "b": True, "f": 1.5}
    dressed = worn(value)
    (key, *_) = dressed.value
    assert key != "<"
    assert (dressed.value["n"], dressed.value["b"], dressed.value["f"], dressed.value[key][1][1]) == (
        None,
        True,
        1.5,
        1,
    )


def test_stand_ins_and_mark_occur_neither_in_the_request_nor_in_the_template():
    dressed = worn("<\ue000", template="\ue001")
    assert not set(dressed.value + dressed.mark) & {"\ue001", "<"}
    assert dressed.mark not in dressed.value
    assert dressed.value[1] == "\ue000"


def test_what_needs_no_disguise_wears_none():
    dressed = worn("plain")
    assert dressed.value == "plain"
    (piece,) = dressed.take_off("plain").pieces
    assert (piece.text, piece.literal) == ("plain", False)
    assert dressed.take_off("").pieces == ()
