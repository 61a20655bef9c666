"""The shape of the code: short modules and functions, stated purposes, nothing unfinished, nothing of one's own machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 40
DEVICE_CODE = ROOT / "megakernel_runtime" / "kernels"  # a device function is one pipeline: splitting it costs registers


def tracked(*suffixes):
    """The repository's own files (not what lies in it by chance), by suffix; all when none is given."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]


MODULES = [
    path
    for path in tracked(".py")
    if path.relative_to(ROOT).parts[0] in ("server", "megakernel_runtime", "benchmarks", "docs")
]


def name_of(path):
    return str(path.relative_to(ROOT))


def functions(path):
    """Yield (name, number of lines) of each function, its docstring and decorators left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, (node.end_lineno - body[0].lineno + 1) if body else 0


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_are_short(path):
    assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES
    if not path.is_relative_to(DEVICE_CODE):
        assert [(name, lines) for name, lines in functions(path) if lines > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_say_what_they_are(path):
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "no docstring"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_exemptions_name_their_rule(path):
    """A blanket `noqa` or `type: ignore` hides more than was meant."""
    for line in path.read_text().splitlines():
        assert not re.search(r"#\s*noqa(?!:\s*[A-Z]+\d+)|#\s*(type|pyright):\s*ignore(?!\[)", line), line


UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")
LEFTOVERS = re.compile(r"pytest\.mark\.ski" r"p\(|breakpoin" r"t\(\)|except Exception:\s*pas" r"s")
OWN_MACHINE = re.compile(r"(?<![\w.])/(home|ro" r"ot|wor" r"k|op" r"t|Users)/[\w.-]+")
TEXT = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".json", "")


@pytest.mark.parametrize("path", tracked(*TEXT), ids=name_of)
def test_nothing_unfinished_and_no_ones_machine(path):
    text = path.read_text()
    for pattern in (UNFINISHED, LEFTOVERS, OWN_MACHINE):
        found = pattern.search(text)
        assert found is None, f"line {text.count(chr(10), 0, found.start()) + 1}: {found[0]}"


def test_every_test_can_fail():
    """A test without an assertion, an expected exception or a checking helper proves nothing."""
    checks = re.compile(r"assert|raises|warns|check|expect|fail|approx|verify")
    for path in tracked(".py"):
        if path.name.startswith("test_"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    assert checks.search("\n".join(map(ast.unparse, node.body))), f"{name_of(path)}: {node.name}"
