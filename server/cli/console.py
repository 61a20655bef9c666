"""The two consoles of the command line: results go to stdout, everything said about the work to stderr."""

from __future__ import annotations

from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def size(n_bytes: int) -> str:
    """Return a size as people read it: 258 MiB, 1.4 GiB."""
    return f"{n_bytes / 2**20:,.0f} MiB" if n_bytes < 2**30 else f"{n_bytes / 2**30:,.1f} GiB"
