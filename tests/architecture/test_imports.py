"""The import rules of pyproject.toml hold, and they are the rules that docs/architecture.md states."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold():
    """Runs import-linter in a process of its own; `make lint` runs the same."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def imported(source):
    """Yield the modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import server.cli.app", ("torch", "transformers", "fastapi", "uvicorn", "numpy")),
        ("import server.settings", ("torch", "fastapi")),
        ("import server.scheduling", ("torch", "asyncio")),
        ("import server.telemetry.metrics", ("torch", "fastapi")),
        ("import megakernel_runtime.interface", ("torch", "numpy")),
        ("import megakernel_runtime.factory", ("torch", "transformers")),
        ("import megakernel_runtime.program.builder", ("torch",)),
    ],
)
def test_importing_stays_light(program, absent):
    """What must start fast, or run anywhere, brings no heavy package in, not even through others."""
    code = f"import sys; {program}; print(*(name for name in {absent!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_pickle_is_used_nowhere():
    for package in ("server", "megakernel_runtime"):
        for path in (ROOT / package).rglob("*.py"):
            assert not {"pickle", "cloudpickle", "dill", "marshal"} & set(imported(path.read_text())), path
