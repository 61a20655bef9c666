"""The sandbox in which chat templates run, with the helpers that model makers expect and bounds on time and size.

Helpers and options are those of Hugging Face's `apply_chat_template`. A template comes with a model, not from a client;
still it may not reach Python's inside, run for ever or fill the memory. Must not know: messages, tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MAX_REPEATED_CHARACTERS = 1 << 20
_MAX_EXPONENT = 64


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds on one rendering."""

    seconds: float = 5.0
    characters: int = 16 * 1024 * 1024


class LimitExceeded(TemplateRuntimeError):
    """A template ran longer, or wrote more, than it may."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's text for training; here it is what is inside."""

    tags = {"generation"}  # noqa: RUF012 - declared by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(Namespace):
    """`namespace()` without names that begin with an underscore, which could reach into Python's objects."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}: names with an underscore first are reserved")
        super().__setitem__(name, value)


def _namespace(*args: Any, **values: Any) -> _Namespace:
    space = _Namespace()
    for name, value in dict(*args, **values).items():
        space[name] = value
    return space


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates. Safe to use from several threads."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._deadline: ContextVar[float | None] = ContextVar("deadline", default=None)
        mine = cast("Any", self)  # the library does not say what these dictionaries hold
        mine.filters["tojson"] = _to_json
        mine.globals.update({"raise_exception": _raise, "strftime_now": _now, "namespace": _namespace})

    def render(self, template: Template, values: Mapping[str, object], limits: RenderLimits) -> str:
        """Return the rendered text. Raises LimitExceeded, and whatever the template raises."""
        chunks: list[str] = []
        size = 0
        with self._within(limits.seconds):
            for chunk in template.generate(dict(values)):
                size += len(chunk)
                if size > limits.characters:
                    raise LimitExceeded(f"the chat template wrote more than {limits.characters} characters")
                chunks.append(chunk)
                self.tick()
        return "".join(chunks)

    def tick(self) -> None:
        """Called at each turn of a loop and each call of a macro: raises LimitExceeded once time is up."""
        deadline = self._deadline.get()
        if deadline is not None and time.monotonic() > deadline:
            raise LimitExceeded("the chat template ran longer than it may")

    @contextmanager
    def _within(self, seconds: float) -> Generator[None]:
        token = self._deadline.set(time.monotonic() + seconds)
        try:
            yield
        finally:
            self._deadline.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro)):
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products and powers that would fill the memory."""
        if operator == "**" and isinstance(right, int) and right > _MAX_EXPONENT:
            raise SecurityError(f"a power of {right}; the limit is {_MAX_EXPONENT}")
        for repeated, times in ((left, right), (right, left)):
            if operator != "*" or not isinstance(repeated, str | list | tuple) or not isinstance(times, int):
                continue
            if len(cast("Sized", repeated)) * times > _MAX_REPEATED_CHARACTERS:
                raise SecurityError(
                    f"a text repeated {times} times; the limit is {_MAX_REPEATED_CHARACTERS} characters"
                )
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    """Return the local time in strftime's format `form`."""
    return datetime.now(UTC).astimezone().strftime(form)
