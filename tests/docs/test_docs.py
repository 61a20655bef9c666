"""The documentation says what the code says: generated parts are fresh, links, commands, targets and paths exist."""

import re
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from docs.generate import SECTIONS, generated
from server.cli.app import app
from server.settings import ENV_PREFIX, Settings
from server.telemetry.families import FAMILIES

ROOT = Path(__file__).parents[2]
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
TEXT = {ROOT / name: (ROOT / name).read_text() for name in LISTED.split() if (ROOT / name).is_file()}


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", list(generated()), ids=name_of)
def test_generated_parts_are_fresh(path):
    assert path.read_text() == generated()[path], "run `make docs`"


def test_each_generated_part_has_a_place():
    pages = "\n".join(TEXT.values())
    for name in SECTIONS:
        assert pages.count(f"<!-- generated: {name} -->\n") == 1


def test_every_metric_and_setting_is_documented():
    metrics, configuration = TEXT[ROOT / "docs/metrics.md"], TEXT[ROOT / "docs/configuration.md"]
    assert all(f"| `{family.name}` |" in metrics for family in FAMILIES)
    assert all(f"| `{name}` |" in configuration for name in Settings.model_fields)


def test_no_page_names_a_metric_that_does_not_exist():
    suffixes = ("", "_bucket", "_sum", "_count")
    known = {family.name + suffix for family in FAMILIES for suffix in suffixes}
    for path, text in TEXT.items():
        assert set(re.findall(r"\bvllm:[a-z0-9_]+", text)) <= known, name_of(path)


def test_no_page_names_a_variable_that_does_not_exist():
    known = {
        ENV_PREFIX,
        f"{ENV_PREFIX}SERVICE_HOST",
        *(f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields),
    }
    for path, text in TEXT.items():
        assert set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]*", text)) <= known, name_of(path)


@pytest.mark.parametrize("path", TEXT, ids=name_of)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT[path]):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), target


COMMAND = re.compile(r"(?:^|`|^ {4})(make|megakernel) ([a-z-]+)", re.MULTILINE)  # on a line of its own, or quoted


@pytest.mark.parametrize("path", TEXT, ids=name_of)
def test_commands_and_make_targets_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {"make": targets, "megakernel": set(get_command(app).commands)}
    for program, command in COMMAND.findall(TEXT[path]):
        assert command in known[program], f"{program} {command}"


def test_the_tree_in_the_readme_is_the_tree():
    tree = re.search(r"```text\n(.*?)```", TEXT[ROOT / "README.md"], re.DOTALL)
    assert tree
    stack = []
    for line in tree[1].splitlines():
        found = re.match(r"( *)([\w./-]+)", line)
        if found and "  " in line.strip():
            depth = len(found[1]) // 2
            stack[depth:] = [found[2]]
            assert ROOT.joinpath(*stack).exists(), "/".join(stack)


def test_every_decision_is_in_the_index():
    folder = ROOT / "docs" / "decisions"
    listed = set(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", TEXT[folder / "README.md"]))
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}
