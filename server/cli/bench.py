"""`megakernel bench ...`: runs the measurements of benchmarks/, which come with a clone of the repository.

Each is a script of its own process, so that what it measures is not warmed or slowed by this one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from server.errors import ConfigError

bench = typer.Typer(
    help="Measure this machine: each prints a table and one JSON line.", no_args_is_help=True, rich_markup_mode="rich"
)

_PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@bench.command("cpu", context_settings=_PASSED_ON)
def cpu(context: typer.Context) -> None:
    """The cpu backend against Hugging Face generate: decode, batching, memory. Options: bench cpu --help."""
    _run("cpu.py", context.args)


@bench.command("decode", context_settings=_PASSED_ON)
def decode(context: typer.Context) -> None:
    """Decode steps on a GPU: megakernel, graphs, eager in turns, and the read ceiling. Options: bench decode --help."""
    _run("decode.py", context.args)


@bench.command("http", context_settings=_PASSED_ON)
def http(context: typer.Context) -> None:
    """What HTTP and scheduling add to a token, and what several streams gain. Options: bench http --help."""
    _run("http_overhead.py", context.args)


@bench.command("startup", context_settings=_PASSED_ON)
def startup(context: typer.Context) -> None:
    """Seconds from `megakernel serve` to ready. Options: bench startup --help."""
    _run("startup.py", context.args)


def _run(name: str, arguments: list[str]) -> None:
    """Run a benchmark and end with its exit code. Raises ConfigError where benchmarks/ is not at hand."""
    script = Path(__file__).parents[2] / "benchmarks" / name
    if not script.is_file():
        raise ConfigError(f"{script} does not exist; benchmarks run from a clone of the repository")
    raise typer.Exit(subprocess.run([sys.executable, str(script), *arguments], check=False).returncode)
