"""What a person (or a log collector) sees while `megakernel serve` starts: phases, the resolved plan, where to call.

Knows how to show it; what happens when is decided in serve.py. Must not know: uvicorn, the engine's inside.
"""

from __future__ import annotations

import json
import logging
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from server.cli.console import size
from server.engine.messages import Hello
from server.plan import ServePlan

logger = logging.getLogger(__name__)

TELL_EVERY_S = 10.0


class Display(Protocol):
    """Shows the start-up. Calling it reports progress of a phase (`megakernel_runtime.interface.Progress`)."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show that `phase` has come to `done` of `total` (0: unknown); the phases before it are over."""
        ...

    def ready(self, plan: ServePlan, hello: Hello, url: str) -> None:
        """All phases are over: show the plan and how to call the server at `url`."""
        ...


def make_display(log_format: str, console: Console) -> Display:
    """Return bars and a table for people, log records for machines."""
    return LogDisplay() if log_format == "json" else ConsoleDisplay(console)


class ConsoleDisplay:
    """A line with a bar for each phase, then a table."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(show_speed=False),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing; what was drawn stays."""
        self._progress.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Draw a phase's progress."""
        if phase not in self._tasks:
            self._finish_all()
            self._tasks[phase] = self._progress.add_task(phase.capitalize(), total=None)
        self._progress.update(self._tasks[phase], completed=done, total=total or None)

    def ready(self, plan: ServePlan, hello: Hello, url: str) -> None:
        """Draw the table of the plan and a curl line."""
        self._finish_all()
        self._progress.stop()
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, value in describe(plan, hello).items():
            table.add_row(name, value)
        self._console.print("\n", table, "\n", sep="", end="")
        self._console.print(f"[bold green]Ready[/bold green] at [bold]{url}[/bold]   (stop: Ctrl-C)\n\n  Try it:\n")
        self._console.print(curl_line(plan, url), markup=False, soft_wrap=True)
        self._console.print()

    def _finish_all(self) -> None:
        for task in self._progress.tasks:
            if not task.finished:
                self._progress.update(task.id, completed=task.total or 1, total=task.total or 1)


class LogDisplay:
    """One record when a phase begins and one when it is over; the whole plan in the last."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._since = self._last_told = time.monotonic()

    def __enter__(self) -> Self:
        """Nothing to start."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to stop."""

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Log a change of phase, and progress inside a phase every ten seconds."""
        now = time.monotonic()
        if phase != self._phase:
            self._finish()
            self._phase, self._since, self._last_told = phase, now, now
            logger.info("phase started", extra={"phase": phase})
        elif now - self._last_told >= TELL_EVERY_S:
            self._last_told = now
            logger.info("phase goes on", extra={"phase": phase, "done": done, "total": total or None})

    def ready(self, plan: ServePlan, hello: Hello, url: str) -> None:
        """Log the plan."""
        self._finish()
        shown = {name.replace(" ", "_"): value for name, value in describe(plan, hello).items()}
        logger.info("ready", extra={"url": url, **shown})

    def _finish(self) -> None:
        if self._phase is not None:
            seconds = round(time.monotonic() - self._since, 3)
            logger.info("phase finished", extra={"phase": self._phase, "seconds": seconds})
            self._phase = None


def describe(plan: ServePlan, hello: Hello) -> dict[str, str]:
    """Return what is served on what, for people: name -> value. Holds no secret."""
    pages = f"{hello.n_pages:,} pages of {hello.page_size_tokens}"
    return {
        "model": f"{', '.join(plan.served_names)}  ({hello.model})",
        "files": str(plan.model_path),
        "backend": hello.backend,
        "device": hello.device,
        "weights": size(hello.weight_bytes),
        "context": f"{hello.max_model_len_tokens:,} tokens",
        "slots": f"{hello.max_slots} sequences at once, {plan.scheduler.max_queue_requests} may wait",
        "KV cache": f"{hello.n_pages * hello.page_size_tokens:,} tokens ({pages}, {size(hello.kv_bytes)})",
        "prefix cache": "on" if plan.scheduler.prefix_cache else "off",
        "access": f"with an API key ({len(plan.api_keys)} known)" if plan.api_keys else "open: no API key is asked for",
    }


def curl_line(plan: ServePlan, url: str) -> str:
    """Return a command that, pasted into a shell, streams an answer."""
    key = "-H 'Authorization: Bearer YOUR_KEY' " if plan.api_keys else ""
    body = {
        "model": plan.served_names[0],
        "messages": [{"role": "user", "content": "What is a megakernel?"}],
        "stream": True,
    }
    data = json.dumps(body).replace("'", "'\\''")
    return f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' {key}\\\n    -d '{data}'"
