"""One page about a run on a GPU: which tests of which file, on what, in what time; also as JSON with --gpu-report."""

from __future__ import annotations

import json
import platform
import time
from collections import defaultdict
from pathlib import Path

import pytest

_BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --gpu-report."""
    parser.addoption("--gpu-report", type=Path, help="write the report on the GPU tests to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Note when the run began."""
    config.stash[_BEGAN] = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the page, and write it where asked."""
    if (path := config.getoption("--gpu-report", None)) is None:  # unknown where tests/kernel was not named
        return
    report = _report(terminalreporter, time.monotonic() - config.stash[_BEGAN])
    terminalreporter.section("GPU report")
    for line in _page(report):
        terminalreporter.write_line(line)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _report(reporter: pytest.TerminalReporter, seconds: float) -> dict[str, object]:
    files: dict[str, dict[str, float]] = defaultdict(lambda: {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
    failures: list[str] = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for test in reporter.stats.get(outcome, []):
            row = files[test.nodeid.split("::")[0]]
            row["failed" if outcome == "error" else outcome] += 1
            row["seconds"] += test.duration
            if outcome in ("failed", "error"):
                failures.append(test.nodeid)
    return {"machine": _machine(), "seconds": round(seconds, 1), "files": dict(files), "failures": failures}


def _machine() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "gpu": "none"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.multi_processor_count} SMs"
        import triton

        found["triton"] = triton.__version__
    return found


def _page(report: dict) -> list[str]:
    lines = [", ".join(f"{key} {value}" for key, value in report["machine"].items()), ""]
    for name, row in report["files"].items():
        counts = ", ".join(f"{int(row[key])} {key}" for key in ("passed", "failed", "skipped") if row[key])
        lines.append(f"{name:44} {row['seconds']:7.1f} s  {counts}")
    lines += [f"{'all':44} {report['seconds']:7.1f} s", *(f"FAILED {name}" for name in report["failures"])]
    return lines
