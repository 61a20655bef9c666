"""What pydantic found wrong -> one error that a person can act on: field, value, limit, remedy.

Must not know: which fields there are.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from server.errors import InvalidRequest
from server.protocol.values import shown

# Type of pydantic's error -> (what the value must be, OpenAI's code); {…} are pydantic's own facts.
_MUST: dict[str, tuple[str, str]] = {
    "greater_than": ("it must be greater than {gt}", "below_min_value"),
    "greater_than_equal": ("it must be at least {ge}", "below_min_value"),
    "less_than": ("it must be less than {lt}", "above_max_value"),
    "less_than_equal": ("it must be at most {le}", "above_max_value"),
    "finite_number": ("it must be a finite number", "invalid_value"),
    "int_type": ("it must be an integer", "invalid_type"),
    "float_type": ("it must be a number", "invalid_type"),
    "bool_type": ("it must be true or false", "invalid_type"),
    "string_type": ("it must be a string", "invalid_type"),
    "list_type": ("it must be a list", "invalid_type"),
    "dict_type": ("it must be an object", "invalid_type"),
    "model_type": ("it must be an object", "invalid_type"),
    "model_attributes_type": ("it must be an object", "invalid_type"),
    "literal_error": ("it must be {expected}", "invalid_value"),
    "string_too_short": ("it must have at least {min_length} character(s)", "invalid_value"),
    "string_too_long": ("it must have at most {max_length} characters", "invalid_value"),
    "string_pattern_mismatch": ("it must match {pattern}", "invalid_value"),
    "too_short": ("it must have at least {min_length} item(s)", "invalid_value"),
}


def as_invalid_request(error: ValidationError) -> InvalidRequest:
    """Return the first thing found wrong; the others mostly follow from it or wait their turn."""
    found = error.errors(include_url=False)[0]
    kind, context = found["type"], found.get("ctx", {})
    param = _path(found)
    if kind == "missing":
        return InvalidRequest(f"{param} is missing; it must be given", param=param, code="missing_required_parameter")
    if kind == "union_tag_not_found":
        param = f"{param}.role"
        return InvalidRequest(f"{param} is missing; it must be given", param=param, code="missing_required_parameter")
    if kind == "union_tag_invalid":
        param = f"{param}.role"
        message = f"{param} is {shown(context['tag'])}; it must be one of {context['expected_tags']}"
        return InvalidRequest(message, param=param, code="invalid_value")
    if kind == "value_error":
        return InvalidRequest(f"{param} {context['error']}", param=param, code="invalid_value")
    must, code = _MUST.get(kind, ("it " + found["msg"][:1].lower() + found["msg"][1:], "invalid_value"))
    message = f"{param} is {shown(found['input'])}; {_fill(must, context)}"
    return InvalidRequest(message, param=param, code=code)


def _fill(must: str, context: dict[str, Any]) -> str:
    short = {name: f"{fact:g}" if isinstance(fact, float) else fact for name, fact in context.items()}
    return must.format(**short)


def _path(found: ErrorDetails) -> str:
    """Return where it stands, as OpenAI writes it: messages[0].content. A union's tag is no part of it."""
    out = ""
    previous: int | str = ""
    for part in found["loc"]:
        if isinstance(part, int):
            out += f"[{part}]"
        elif not isinstance(previous, int):
            out += f".{part}" if out else part
        else:
            out += "" if part in _TAGS else f".{part}"
        previous = part
    return out


_TAGS = ("system", "developer", "user", "assistant", "tool")
