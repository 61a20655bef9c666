"""`megakernel models` and `megakernel pull`: what can be served by name, what is on this machine, and fetching it.

Shows what the catalogue knows. Must not know: where files come from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from server.cli.console import err, out, size
from server.cli.options import settings_flags


def models(as_json: Annotated[bool, typer.Option("--json", help="Print the models as JSON.")] = False) -> None:
    """List the models that can be named, and which of them are on this machine."""
    from server.catalog import entries

    here = set(cached_names())
    rows = [
        {
            "name": entry.name,
            "parameters": entry.parameters,
            "size": size(entry.size_bytes) if entry.size_bytes else "",
            "licence": entry.licence,
            "here": entry.name in here,
            "gated": entry.gated,
            "description": entry.description,
        }
        for entry in entries()
    ]
    if as_json:
        print(msgspec.json.encode(rows).decode())  # noqa: T201 (rich would wrap the line)
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("name", "parameters", "size", "licence", "here"):
        table.add_column(column)
    table.add_column("", style="dim")
    for row in rows:
        cells = [escape(str(row[column])) for column in ("name", "parameters", "size", "licence")]
        table.add_row(*cells, "[green]✓[/green]" if row["here"] else "", escape(str(row["description"])))
    out.print(table)
    out.print("\n[dim]Also: a Hugging Face directory, a .gguf file, or a hub id such as org/name.[/dim]")


def _pull(flags: dict[str, object]) -> None:
    """Fetch a model, so that it can be served without network."""
    from server.catalog import resolve
    from server.cli.startup import ConsoleDisplay
    from server.settings import load_settings

    settings = load_settings(flags)
    with ConsoleDisplay(err) as display:
        path = resolve(settings.model, cache_dir=settings.cache_dir.expanduser(), progress=display)
    out.print(escape(str(path)), soft_wrap=True)


pull = settings_flags(_pull, only=("model", "cache_dir"), positional="model")


def cached_names() -> tuple[str, ...]:
    """Return the names of the catalogue's models that are on this machine."""
    from server.catalog import cached_path, entries

    return tuple(entry.name for entry in entries() if cached_path(entry, cache_dir()) is not None)


def cache_dir() -> Path:
    """Return the cache directory that the settings name."""
    from server.settings import load_settings

    return load_settings({}).cache_dir.expanduser()
