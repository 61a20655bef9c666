"""The commands and their help. Each command's module is imported when this one is; heavy imports wait until it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from server.cli.bench import bench
from server.cli.chat import chat
from server.cli.check import check
from server.cli.console import out
from server.cli.models import models, pull
from server.cli.serve import serve_command

app = typer.Typer(
    name="megakernel",
    help="OpenAI-compatible LLM server on one resident GPU megakernel, with measured GPU idle time.",
    epilog="Settings can also stand in a file (--config) or in MEGAKERNEL_* variables: see docs/configuration.md.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_USE, _MODELS, _MACHINE = "Serve and chat", "Models", "This machine"


def version_command() -> None:
    """Print the version."""
    from server.version import version

    out.print(f"megakernel {version()}")


def _version_flag(value: bool) -> None:
    if value:
        version_command()
        raise typer.Exit


@app.callback()
def _main(  # pyright: ignore[reportUnusedFunction] (registered by the decorator)
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version_flag, is_eager=True)
    ] = False,
) -> None:
    del version  # acted on by its callback


app.command("serve", rich_help_panel=_USE)(serve_command)
app.command("chat", rich_help_panel=_USE)(chat)
app.command("pull", rich_help_panel=_MODELS)(pull)
app.command("models", rich_help_panel=_MODELS)(models)
app.command("check", rich_help_panel=_MACHINE)(check)
app.add_typer(bench, name="bench", rich_help_panel=_MACHINE)
app.command("version", rich_help_panel=_MACHINE)(version_command)
