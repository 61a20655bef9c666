"""Messages as clients send them -> messages as chat templates expect them.

Must not know: HTTP, templates' syntax, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from server.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, object]


class TemplateError(InvalidRequest):
    """400: the model's chat template cannot render this conversation; the message is the template's own where it has
    one.
    """


def prepare_messages(messages: Sequence[Mapping[str, object]], *, developer_role: bool, parts: bool) -> list[Message]:
    """Return copies for a template. Raises TemplateError, naming the message, for roles and contents it cannot take.

    developer_role: the template knows role "developer", which else becomes "system".
    parts: the template wants content as a list of parts, else as one string.
    """
    return [
        _prepare(message, f"messages.{i}", developer_role=developer_role, parts=parts)
        for i, message in enumerate(messages)
    ]


def _prepare(message: Mapping[str, object], where: str, *, developer_role: bool, parts: bool) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise TemplateError(f"{where}.role is {role!r}; supported: {', '.join(ROLES)}", param=f"{where}.role")
    out: Message = {name: value for name, value in message.items() if value is not None}
    out["role"] = "system" if role == "developer" and not developer_role else role
    text = _text(message.get("content"), f"{where}.content")
    out["content"] = [{"type": "text", "text": text}] if parts else text
    if "reasoning" in out:
        out.setdefault("reasoning_content", out["reasoning"])
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [_with_arguments(call) for call in cast("Sequence[Mapping[str, object]]", calls)]
    return out


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [_part(part) for part in cast("Sequence[object]", content)] if isinstance(content, list | tuple) else [None]
    if any(text is None for text in texts):
        raise TemplateError(f"{where} must be a string, null or a list of text parts", param=where)
    return "\n".join(text for text in texts if text is not None)


def _part(part: object) -> str | None:
    if isinstance(part, str):
        return part
    text = cast("Mapping[str, object]", part).get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else None


def _with_arguments(call: Mapping[str, object]) -> Message:
    """Return a tool call whose arguments are an object, as templates expect, where the client's JSON text is one."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    held = cast("Mapping[str, object]", function)
    arguments = held.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = arguments
    return {**call, "function": {**held, "arguments": parsed if isinstance(parsed, dict) else arguments}}
