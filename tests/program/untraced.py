"""Long sweeps in two processes of their own, without coverage: tracing would take twice as long.

A module that is swept has `sweep(name)`, which raises where something is wrong; it ends with `untraced.main(sweep)`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence


def main(sweep: Callable[[str], None]) -> None:
    """Sweep the names in the arguments; print what went wrong with each as JSON, null where nothing did."""
    results: dict[str, str | None] = {}
    for name in sys.argv[1:]:
        try:
            sweep(name)
            results[name] = None
        except Exception:  # noqa: BLE001 - reported to the test that asks
            results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)


def run(module: str, names: Sequence[str]) -> dict[str, str | None]:
    """Return what went wrong with each name when `module` swept it, None where nothing did."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    halves = [
        subprocess.Popen(
            [sys.executable, "-m", module, *half],
            env=clean | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for half in (names[::2], names[1::2])
    ]
    results: dict[str, str | None] = {}
    for half in halves:
        out, err = half.communicate()
        assert half.returncode == 0, err
        results |= json.loads(out)
    return results
