"""Writes the parts of the documentation that the code already says: `make docs`; with --check it only compares.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; configs/serve.toml is generated whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.cli.options import flag_name, schema_extra, shown_default
from server.protocol.chat import ChatRequest
from server.protocol.completion import CompletionRequest
from server.protocol.refused import CHAT, COMPLETION
from server.protocol.values import Accepted
from server.settings import Settings
from server.telemetry.families import FAMILIES, Family

ROOT = Path(__file__).parents[1]

_ACCEPTED = str(Accepted.__metadata__[0].description)  # type: ignore[attr-defined] # what Annotated holds
_BOUNDS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("exclusiveMaximum", "< {}"),
    ("minItems", "at least {}"),
    ("maxLength", "at most {} characters"),
    ("pattern", "`{}`"),
)
_SPELLED = {2**31 - 1: "2³¹ - 1", -(2**31): "-2³¹", 2**64: "2⁶⁴", -(2**63): "-2⁶³"}


def settings_tables() -> str:
    """Return one Markdown table of settings for each panel of `megakernel serve --help`."""
    lines: list[str] = []
    for panel, names in _panels().items():
        lines += ["", f"### {panel}", "", "| setting | flag | default | meaning |", "| --- | --- | --- | --- |"]
        for name in names:
            field = Settings.model_fields[name]
            default = f"`{shown_default(field)}`" if shown_default(field) else "-"
            lines.append(f"| `{name}` | `{flag_name(name)}` | {default} | {field.description} |")
    return "\n".join([*lines, ""])


def serve_toml() -> str:
    """Return configs/serve.toml: every setting, commented out, with its default."""
    lines = [
        "# Serving defaults, read by every `megakernel serve`; --config, MEGAKERNEL_* variables and flags win.",
        "# Every setting stands here with its default: remove the # to change one. Written by `make docs`.",
    ]
    for panel, names in _panels().items():
        lines += ["", f"# ---- {panel}"]
        for name in names:
            if name == "config":  # which file to read cannot stand in a file
                continue
            field = Settings.model_fields[name]
            lines += ["", f"# {field.description}", f"# {name} = {_toml_value(name)}"]
    return "\n".join([*lines, ""])


def metric_tables() -> str:
    """Return one Markdown table of metric families for each group of names."""
    groups: dict[str, list[Family]] = {"vLLM's names": [], "The device and its engine": [], "The server process": []}
    for family in FAMILIES:
        own = "The device and its engine" if family.feed == "engine" else "The server process"
        groups["vLLM's names" if family.per_model else own].append(family)
    lines: list[str] = []
    for title, families in groups.items():
        lines += ["", f"### {title}", "", "| name | type | labels | meaning |", "| --- | --- | --- | --- |"]
        lines += [_metric_row(family) for family in families]
    return "\n".join([*lines, ""])


def _metric_row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels) or "-"
    gpu = " *GPU only: zero on the cpu backend.*" if family.gpu_only else ""
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help}{gpu} |"


def field_tables() -> str:
    """Return a Markdown table of the fields that are honoured, and a sentence with those that change nothing."""
    chat, text = ChatRequest.model_json_schema()["properties"], CompletionRequest.model_json_schema()["properties"]
    lines = ["", "| field | of | default | bounds | meaning |", "| --- | --- | --- | --- | --- |"]
    unused: list[str] = []
    for name in dict.fromkeys((*chat, *text)):
        both = chat.get(name) == text.get(name)
        if both and chat[name].get("description") == _ACCEPTED:
            unused.append(f"`{name}`")
            continue
        for schema, of in ((chat.get(name), "both" if both else "chat"), (None if both else text.get(name), "text")):
            if schema is not None:
                lines.append(_field_row(name, of, schema))
    return "\n".join([*lines, "", f"Taken, and change nothing about the answer: {', '.join(unused)}.", ""])


def _field_row(name: str, of: str, schema: dict[str, Any]) -> str:
    default = schema.get("default")
    shown = "-" if default is None or default == [] else f"`{str(default).lower()}`"
    return f"| `{name}` | {of} | {shown} | {_bounds(schema) or '-'} | {schema.get('description', '-')} |"


def _bounds(schema: dict[str, Any]) -> str:
    """Return the bounds of a value; where it may be null, those of the other kind."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    kind = kinds[0] if len(kinds) == 1 else schema
    return ", ".join(text.format(_SPELLED.get(kind[key], kind[key])) for key, text in _BOUNDS if key in kind)


def refused_table() -> str:
    """Return a Markdown table of the fields that are known and not honoured: each is answered with a 400."""
    lines = ["", "| field | of | would be |", "| --- | --- | --- |"]
    for name in dict.fromkeys((*CHAT, *COMPLETION)):
        both = name in CHAT and name in COMPLETION
        of = "both" if both else "chat" if name in CHAT else "text"
        lines.append(f"| `{name}` | {of} | {(CHAT.get(name) or COMPLETION[name]).what} |")
    return "\n".join([*lines, ""])


def _panels() -> dict[str, list[str]]:
    panels: dict[str, list[str]] = {}
    for name, field in Settings.model_fields.items():
        panels.setdefault(schema_extra(field)["panel"], []).append(name)
    return panels


def _toml_value(name: str) -> str:
    field = Settings.model_fields[name]
    if field.default == ():
        return "[]"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    shown = shown_default(field)
    return shown if isinstance(field.default, int | float) and shown.replace(".", "").isdigit() else f'"{shown}"'


SECTIONS: dict[str, Callable[[], str]] = {
    "settings": settings_tables,
    "metrics": metric_tables,
    "fields": field_tables,
    "refused": refused_table,
}


def generated() -> dict[Path, str]:
    """Return file -> its whole text as it should be, for every file with a generated part."""
    result = {ROOT / "configs" / "serve.toml": serve_toml()}
    for path in sorted((ROOT / "docs").glob("**/*.md")):
        text = path.read_text()
        for name, make in SECTIONS.items():
            pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
            text = pattern.sub(lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", text)
        if "<!-- generated:" in text:
            result[path] = text
    return result


def main() -> int:
    """Write what is stale, or only name it with --check; return 1 if anything was."""
    stale = [path for path, text in generated().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"stale: {path.relative_to(ROOT)}")
        if "--check" not in sys.argv:
            path.write_text(generated()[path])
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
