"""The version of this server, from the installed package: pyproject.toml is where it is written down."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def version() -> str:
    """Return e.g. "0.1.0"."""
    return importlib.metadata.version("megakernel")
