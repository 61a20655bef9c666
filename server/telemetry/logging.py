"""Structured logs on stderr: one line a record, for people (console) or machines (JSON), through the standard library.

Whoever logs passes facts as `extra={...}`; this module renders them and withholds what must never be logged: keys,
credentials, and what users wrote or read. Must not know: who logs, HTTP, the engine.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("console", "json")

WITHHELD: Final = frozenset(
    {"api_key", "api_keys", "authorization", "body", "completion", "content", "delta", "messages", "password"}
    | {"prompt", "secret", "text", "token_ids"}
)

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
_QUIET: Final = ("httpx", "httpcore", "asyncio", "urllib3", "filelock", "uvicorn")


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send all records of at least `level` to `stream` (stderr when None). Replaces any earlier configuration."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def facts(record: logging.LogRecord) -> dict[str, object]:
    """Return the record's `extra` fields; a withheld one shows its name and that it was withheld."""
    return {
        key: "[withheld]" if key.lower() in WITHHELD else value
        for key, value in vars(record).items()
        if key not in _STANDARD
    }


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts (RFC 3339, UTC), level, logger, event, then the record's facts."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a newline. Values that JSON cannot say are rendered by str()."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {key: value for key, value in facts(record).items() if key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class ConsoleFormatter(logging.Formatter):
    """`12:30:01.250 INFO    server.api  request finished  status=200 tokens=17`, then the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; only a traceback makes it more than one."""
        clock = datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(sep=" ", timespec="milliseconds")
        shown = " ".join(f"{key}={value}" for key, value in facts(record).items())
        line = f"{clock[11:23]} {record.levelname:<7} {record.name}  {record.getMessage()}"
        line += f"  {shown}" if shown else ""
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
