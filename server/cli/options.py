"""Turns `Settings` into command line flags, so that a setting is written down once: name, type, default, help, panel.

Knows typer and the settings' schema. Must not know: what any setting does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from server.settings import Settings

POSITIONAL = "bare_argument"  # name of the parameter of an argument without a flag


def settings_flags(
    command: Callable[[dict[str, object]], None], *, only: tuple[str, ...] = (), positional: str = ""
) -> Callable[..., None]:
    """Return `command` as a function with one keyword parameter for each setting (those in `only`, if given).

    Typer reads the signature; `command` is called with the flags that were given, name -> value, and nothing else. The
    setting `positional` can also be given without its flag; given both ways, the flag counts.
    """

    def run(**flags: object) -> None:
        bare = {positional: flags.pop(POSITIONAL, None)}
        given = {name: value for name, value in flags.items() if value is not None and value != []}
        command({name: value for name, value in bare.items() if value is not None} | given)

    parameters = [_parameter(name, field) for name, field in Settings.model_fields.items() if not only or name in only]
    if positional:
        parameters.append(_argument(positional))
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess] (read by typer)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def flag_name(name: str) -> str:
    """Return the flag of the setting `name`."""
    return "--" + name.replace("_", "-")


def shown_default(field: FieldInfo) -> str:
    """Return a field's default as a person would type it; empty when there is none to show."""
    extra = schema_extra(field)
    if "shown_default" in extra:
        return extra["shown_default"]
    default = field.default
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default == ():
        return ""
    if isinstance(default, ByteSize) and default:
        return default.human_readable()
    return f"{default:g}" if isinstance(default, float) else str(default)


def schema_extra(field: FieldInfo) -> Mapping[str, str]:
    """Return what `Settings` says about a field beside its type: its panel, how to show its default."""
    return cast("Mapping[str, str]", field.json_schema_extra)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = flag_name(name)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag,
        help=_help(field),
        rich_help_panel=schema_extra(field)["panel"],
        show_default=False,
        metavar=_metavar(field),
    )
    annotation = Annotated[_flag_type(field.annotation), option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(field: FieldInfo) -> str:
    default = shown_default(field)
    return f"{field.description} [dim]\\[{default}][/dim]" if default else str(field.description)


def _argument(name: str) -> inspect.Parameter:
    help_text = f"Same as {flag_name(name)}."
    annotation = Annotated[str | None, typer.Argument(metavar=name.upper(), help=help_text, show_default=False)]
    return inspect.Parameter(POSITIONAL, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag_type(annotation: Any) -> Any:
    """Return the type that typer parses; pydantic judges the value later. None stands for a flag that was not given."""
    if get_origin(annotation) is tuple:
        return list[str] | None
    return str | None if annotation is ByteSize else annotation | None


def _metavar(field: FieldInfo) -> str | None:
    return "SIZE" if field.annotation is ByteSize else None
