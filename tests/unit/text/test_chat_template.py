"""Chat templates: rendered as transformers renders them, and nothing that a user writes becomes a control token."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from server.errors import ModelError
from server.text.chat_template import ChatTemplate, TemplateError, load_chat_template
from server.text.template_environment import RenderLimits
from server.text.tokenizer import load_tokenizer
from tests.unit.text.tokenizers_of import CONTROL, byte_level, write_directory

PROPERTY = settings(derandomize=True, deadline=None, max_examples=150)
HI = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is <b>1 + 1</b>?\n"},
    {"role": "assistant", "content": "<think>easy</think>2"},
    {"role": "user", "content": "And é🎈?"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "trims and looks for texts": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' and '</think>' in m.content %}"
        "{% set text = m.content.split('</think>')[-1] %}{% else %}{% set text = m.content | trim %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ text }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "parts": (
        "{% for m in messages %}{{ m.role | upper }}: {% for part in m.content %}{% if part.type == 'text' %}"
        "{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "json": "{{ messages | tojson }}{{ tools | tojson }}{% if add_generation_prompt %}<|im_start|>{% endif %}",
}


def template(source, **options):
    texts = {"bos_token": CONTROL[0], "eos_token": CONTROL[2]}
    return ChatTemplate(source, texts=texts, control=CONTROL, **options)


@pytest.fixture(scope="module")
def transformers_renders():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token=CONTROL[0], eos_token=CONTROL[2])

    def render(source, messages, **options):
        return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)

    return render


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_it_is_what_transformers_renders(name, prompt, transformers_renders):
    ours = template(TEMPLATES[name]).render(TALK, add_generation_prompt=prompt)
    talk = TALK
    if name == "parts":  # that template takes content in parts only, which transformers leaves to its caller
        talk = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK]
    assert ours.text == transformers_renders(TEMPLATES[name], talk, add_generation_prompt=prompt)


@pytest.mark.parametrize("name", ["chatml", "trims and looks for texts"])
def test_going_on_with_the_last_message_too(name, transformers_renders):
    talk = [*TALK, {"role": "assistant", "content": "It is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ours = template(TEMPLATES[name]).render(talk, **options).text
    assert ours == transformers_renders(TEMPLATES[name], talk, **options)
    assert ours.endswith("It is")


def test_a_message_in_parts_can_be_gone_on_with():
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert template(TEMPLATES["parts"]).render(TALK[:2], **options).text.endswith("<b>1 + 1</b>?\n")


def test_tools_are_given_to_the_template_for_them():
    tools = [{"type": "function", "function": {"name": "f"}}]
    two = template("plain{{ messages[0].content }}", tool_source="{{ tools | tojson }}")
    assert two.render(HI).text == "plainhi"
    assert json.loads(two.render(HI, tools=tools).text) == tools


def test_kwargs_are_variables():
    source = "{{ messages[0].content }}{% if not enable_thinking %}!{% endif %}{{ note }}"
    assert template(source).render(HI, kwargs={"enable_thinking": True, "note": "n"}).text == "hin"


def test_developers_are_systems_where_the_template_knows_none():
    talk = [{"role": "developer", "content": "a"}]
    assert template("{{ messages[0].role }}").render(talk).text == "system"
    assert template("{# developer #}{{ messages[0].role }}").render(talk).text == "developer"


class TestRefusals:
    @pytest.mark.parametrize(
        ("source", "told"),
        [
            ("{{ raise_exception('Roles must alternate') }}", "^Roles must alternate$"),
            ("{{ raise_exception('') }}", "refused the messages"),
            ("{{ messages[0].content.nothing.more }}", "no attribute"),
            ("{{ 1 / 0 }}", "cannot render the messages: division by zero"),
            ("{{ messages[0].content + 1 }}", "cannot render the messages"),
            ("{% for x in range(99999) %}{{ x }}{% endfor %}", "more than 100 characters"),
        ],
    )
    def test_a_template_s_reason_is_the_client_s_to_know(self, source, told):
        with pytest.raises(TemplateError, match=told) as caught:
            template(source, limits=RenderLimits(characters=100)).render(HI)
        assert caught.value.param == "messages"

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"add_generation_prompt": True, "continue_final_message": True}, "cannot both be true"),
            ({"kwargs": {"messages": []}}, "chat_template_kwargs cannot set messages"),
            ({"kwargs": {"tools": []}}, "chat_template_kwargs cannot set tools"),
        ],
    )
    def test_what_makes_no_sense_together(self, options, told):
        with pytest.raises(TemplateError, match=told):
            template(CHATML).render(HI, **options)

    def test_no_messages(self):
        with pytest.raises(TemplateError, match="messages is empty"):
            template(CHATML).render([])

    def test_a_last_message_that_the_template_leaves_out_cannot_be_continued(self):
        with pytest.raises(TemplateError, match="leaves out the final message"):
            template("{{ messages[0].content }}").render(
                [*HI, *HI], add_generation_prompt=False, continue_final_message=True
            )

    def test_more_kinds_of_characters_than_there_are_stand_ins(self):
        everything = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
        with pytest.raises(TemplateError, match="use up all private-use characters"):
            template(CHATML).render([{"role": "user", "content": everything + "<"}])

    @pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% unknown %}"])
    def test_a_template_that_does_not_parse_is_told_at_start_up(self, source):
        with pytest.raises(ModelError, match="chat template cannot be used"):
            template(source)


# ---------------------------------------------------------------- what users write stays data


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_directory(tmp_path_factory.mktemp("model"), byte_level()))


NASTY = st.lists(
    st.sampled_from([*CONTROL, "<|im_", "end|>", "<", "|", ">", "\n", " ", "user", "</think>", "\ue000", "é", "a"]),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", TEMPLATES)
def test_whatever_users_write_the_control_tokens_are_the_template_s(name, tokenizer):
    chat = template(TEMPLATES[name])

    def control_ids(content):
        ids = tokenizer.encode_pieces(chat.render([{"role": "user", "content": content}]))
        return [i for i in ids if i in tokenizer.special_ids]

    harmless = control_ids("a")

    @given(NASTY)
    @PROPERTY
    def check(content):
        assert control_ids(content) == harmless

    check()


def test_whatever_users_write_is_in_the_prompt_as_written(tokenizer):
    chat = template(CHATML)

    @given(NASTY)
    @PROPERTY
    def check(content):
        prompt = chat.render([{"role": "user", "content": content}])
        assert f"user\n{content}<|im_end|>" in prompt.text
        assert tokenizer.decode(tokenizer.encode_pieces(prompt), skip_special=False) == prompt.text

    check()


def test_texts_without_control_tokens_have_the_ordinary_ids(tokenizer):
    """Keeping data apart from control costs nothing: the ids are those of the rendered text."""
    prompt = template(CHATML).render(TALK)
    assert tokenizer.encode_pieces(prompt) == byte_level().encode(prompt.text, add_special_tokens=False).ids


class TestLoading:
    def test_the_model_s_own_is_used(self, tmp_path):
        write_directory(tmp_path, byte_level(), tokenizer_config={"eos_token": "<|im_end|>"})
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
        loaded = load_chat_template(load_tokenizer(tmp_path))
        assert (loaded.render(HI).text, loaded.notice) == ("hi<|im_end|>", None)

    def test_without_one_it_is_chatml_and_the_operator_is_told(self, tmp_path):
        loaded = load_chat_template(load_tokenizer(write_directory(tmp_path, byte_level())))
        assert loaded.render(HI).text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert "ChatML is used" in loaded.notice
