"""Conversations to prompts, by the model's own chat template, with users' text kept apart from control tokens.

Must not know: HTTP, sampling, token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jinja2
from jinja2 import nodes

from server.errors import ModelError
from server.text.chat_messages import Message, TemplateError, prepare_messages
from server.text.disguise import Disguise
from server.text.prompt_pieces import PromptPieces
from server.text.template_environment import RenderLimits, TemplateEnvironment
from server.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TemplateError", "load_chat_template"]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NO_TEMPLATE = (
    "the model's files hold no chat template, so ChatML is used, which the model may not have learnt; "
    "put a chat_template.jinja beside a Hugging Face model's files to change that"
)
_OURS = ("messages", "tools", "add_generation_prompt")
_PROBE = "probe"
_LIMITS = RenderLimits()
_ENVIRONMENT = TemplateEnvironment()


def load_chat_template(tokenizer: Tokenizer, limits: RenderLimits = _LIMITS) -> ChatTemplate:
    """Return the model's chat template, or ChatML with `notice` set. Raises ModelError for one that does not parse."""
    source = tokenizer.chat_template
    return ChatTemplate(
        source or _CHATML,
        tool_source=tokenizer.tool_template if source else None,
        texts=tokenizer.texts,
        control=tokenizer.control.keys(),
        notice=None if source else _NO_TEMPLATE,
        limits=limits,
    )


@dataclass(frozen=True, slots=True)
class _Compiled:
    """One template, and what was learnt from its text."""

    template: jinja2.Template
    disguise: Disguise
    developer_role: bool
    parts: bool  # it takes content as a list of parts only


class ChatTemplate:
    """Renders conversations. Safe to use from several threads.

    texts: bos_token, eos_token … as the template names them. control: texts of the tokens that users may not write.
    notice: what the operator should know about the template's origin, if anything.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        texts: Mapping[str, str],
        control: Collection[str],
        notice: str | None = None,
        limits: RenderLimits = _LIMITS,
    ) -> None:
        self.notice = notice
        self._texts = texts
        self._limits = limits
        self._default = self._compile(source, control)
        self._with_tools = self._compile(tool_source, control) if tool_source is not None else self._default

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
    ) -> PromptPieces:
        """Return the prompt. All that `messages`, `tools` and `kwargs` say is data, never a control token.

        continue_final_message: the prompt ends with the last message's text, which the model goes on with.
        Raises TemplateError with the template's own message where it refuses.
        """
        if add_generation_prompt and continue_final_message:
            raise TemplateError("add_generation_prompt and continue_final_message cannot both be true")
        if not messages:
            raise TemplateError("messages is empty; at least one message is needed", param="messages")
        if taken := sorted(set(_OURS) & set(kwargs or {})):
            raise TemplateError(f"chat_template_kwargs cannot set {taken[0]}", param="chat_template_kwargs")
        chosen = self._with_tools if tools else self._default
        prepared = prepare_messages(messages, developer_role=chosen.developer_role, parts=chosen.parts)
        try:
            worn = chosen.disguise.put_on([prepared, list(tools) if tools else None, dict(kwargs or {})])
        except ValueError as error:
            raise TemplateError(str(error), param="messages") from None
        hidden, hidden_tools, extra = cast("tuple[list[Message], object, Message]", worn.value)
        if continue_final_message:
            _append(hidden[-1], worn.mark)
        values = {**self._texts, **extra, "messages": hidden, "tools": hidden_tools}
        text = self._run(chosen.template, {**values, "add_generation_prompt": add_generation_prompt})
        if continue_final_message:
            text, found, _ = text.rpartition(worn.mark)
            if not found:
                raise TemplateError("the chat template leaves out the final message, so it cannot be continued")
        return worn.take_off(text)

    def _run(self, template: jinja2.Template, values: Mapping[str, object]) -> str:
        try:
            return _ENVIRONMENT.render(template, values, self._limits)
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or "the chat template refused the messages", param="messages") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template cannot render the messages: {error}", param="messages") from error

    def _compile(self, source: str, control: Collection[str]) -> _Compiled:
        try:
            template = _ENVIRONMENT.from_string(source)
            looked_for = [str(node.value) for node in _ENVIRONMENT.parse(source).find_all(nodes.Const)]
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template cannot be used: {error}") from error
        return _Compiled(
            template=template,
            disguise=Disguise(control, looked_for, source),
            developer_role="developer" in source,
            parts=not self._shows(template, _PROBE) and self._shows(template, [{"type": "text", "text": _PROBE}]),
        )

    def _shows(self, template: jinja2.Template, content: object) -> bool:
        """Whether a user's message with this content appears in the prompt."""
        messages = [{"role": "user", "content": content}]
        values = {**self._texts, "messages": messages, "tools": None, "add_generation_prompt": True}
        try:
            return _PROBE in self._run(template, values)
        except TemplateError:
            return False


def _append(message: Message, mark: str) -> None:
    """Put `mark` at the end of a message's text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
    else:
        last = cast("list[dict[str, str]]", content)[-1]
        last["text"] += mark
