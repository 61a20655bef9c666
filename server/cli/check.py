"""`megakernel check`: what this machine can run, and why not more. Exit code 0 if it can serve, 1 if not.

Shows what `megakernel_runtime.probe` finds, in a process of its own. Must not know: torch, CUDA.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from server.cli.console import err, out

PROBE_WITHIN_S = 120.0
_MARKS = {"ok": "[green]✓[/green]", "note": "[yellow]•[/yellow]", "no": "[red]✗[/red]"}


class Finding(msgspec.Struct, frozen=True):
    """One line of the report, as the probe writes it."""

    topic: str
    state: str
    detail: str
    remedy: str = ""


def check(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Tell what this machine can run and why not more; exit code 1 if it cannot serve at all."""
    with err.status("Looking at this machine"):
        findings = (*probe(), *cached_models())
    if as_json:
        print(msgspec.json.encode(findings).decode())  # noqa: T201 (rich would wrap the line)
    else:
        out.print(report(findings))
    raise typer.Exit(0 if can_serve(findings) else 1)


def probe(module: str = "megakernel_runtime.probe") -> tuple[Finding, ...]:
    """Return the probe's findings; that it broke is a finding too."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], capture_output=True, text=True, timeout=PROBE_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        return (Finding("Probe", "no", f"no answer within {PROBE_WITHIN_S:.0f} s: a device or its driver hangs"),)
    try:
        return msgspec.json.decode(done.stdout, type=tuple[Finding, ...])
    except msgspec.DecodeError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return (Finding("Probe", "no", f"ended with exit code {done.returncode}: {last}"),)


def cached_models() -> tuple[Finding, ...]:
    """Return one finding for each catalogue model that is on this machine, and one if none is."""
    from server.cli.models import cached_names

    if names := cached_names():
        return (Finding("Models", "ok", f"on this machine: {', '.join(names)}"),)
    return (Finding("Models", "note", "none fetched yet", "the first `megakernel serve` fetches one"),)


def can_serve(findings: tuple[Finding, ...]) -> bool:
    """Whether some backend runs and nothing basic is missing."""
    backends = [finding for finding in findings if finding.topic.startswith("backend ")]
    basics = [finding for finding in findings if not finding.topic.startswith("backend ")]
    return any(finding.state == "ok" for finding in backends) and all(finding.state != "no" for finding in basics)


def report(findings: tuple[Finding, ...]) -> Table:
    """Return the findings as a table: mark, topic, detail and remedy."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    for finding in findings:
        remedy = f"\n[dim]→ {escape(finding.remedy)}[/dim]" if finding.remedy else ""
        table.add_row(_MARKS[finding.state], finding.topic, f"{escape(finding.detail)}{remedy}")
    return table
