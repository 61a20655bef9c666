"""`make` makes its own environment: from the first Python that is new enough, once, and says what is wrong otherwise."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def clone(tmp_path):
    """What make needs of a clone, with Pythons that only say who they are and pretend to install."""
    (tmp_path / ".ci").mkdir()
    for name in ("Makefile", "pyproject.toml", ".ci/make-venv"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "make", "echo", "rm", "touch", "test", "mkdir", "awk", "cat", "chmod", "cp"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def python(clone, name, version, *, can_make_environments=True):
    """Put a program on PATH that answers as a Python of this version would."""
    major, minor, _ = map(int, version.split("."))
    path = clone / "bin" / name
    path.write_text(f"""#!/bin/sh
case "$*" in
    *"print("*) echo {version} ;;
    *"sys.exit("*) exit {int((major, minor) < (3, 11))} ;;
    "-m venv "*)
        {"" if can_make_environments else "exit 1"}
        mkdir -p "$3/bin"; echo "by {name}" > "$3/pyvenv.cfg"; cp "{path}" "$3/bin/python"
        printf '#!/bin/sh\\necho megakernel "$@"\\n' > "$3/bin/megakernel"; chmod +x "$3/bin/megakernel" ;;
    "-m pip "*) echo "pip $*" >> "{clone}/pip.log" ;;
esac
""")
    path.chmod(0o755)
    return path


def make(clone, *arguments):
    environment = {"PATH": str(clone / "bin"), "HOME": str(clone)}
    return subprocess.run(
        ["make", *arguments], cwd=clone, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def installed(clone):
    log = clone / "pip.log"
    return log.read_text().splitlines() if log.exists() else []


def test_it_installs_once_and_serves(clone):
    python(clone, "python3.11", "3.11.7")
    first = make(clone, "serve", "PORT=8001")
    assert first.returncode == 0, first.stderr
    assert "Creating .venv with Python 3.11.7 (python3.11)" in first.stdout
    assert first.stdout.endswith("megakernel serve --port 8001\n")
    assert [line.split(" --quiet ")[1] for line in installed(clone)] == ["torch>=2.11,<2.14", "--editable ."]
    assert make(clone, "serve").stdout == "megakernel serve\n"
    assert len(installed(clone)) == 2


def test_what_is_given_reaches_the_command_in_one_piece(clone):
    python(clone, "python3", "3.13.0")
    done = make(clone, "serve", "MODEL=/my models/a.gguf", "ARGS=--threads 4")
    assert done.stdout.endswith("megakernel serve --model /my models/a.gguf --threads 4\n")


def test_torch_may_come_from_another_index(clone):
    python(clone, "python3", "3.13.0")
    make(clone, "install", "TORCH_INDEX=https://index.test/cpu")
    assert "--index-url https://index.test/cpu torch" in installed(clone)[0]
    assert "--index-url" not in installed(clone)[1]


def test_changed_requirements_are_installed(clone):
    python(clone, "python3", "3.13.0")
    make(clone, "install")
    newer = (clone / ".venv" / ".installed-serve").stat().st_mtime + 10
    os.utime(clone / "pyproject.toml", (newer, newer))
    make(clone, "install")
    assert len(installed(clone)) == 4


def test_a_python_that_is_too_old_or_not_there_is_passed_over(clone):
    python(clone, "python3.12", "3.9.18")
    python(clone, "python3", "3.14.1")
    assert "Python 3.14.1 (python3)" in make(clone, "install").stdout


def test_without_a_python_that_is_new_enough_it_says_what_it_found_and_what_to_do(clone):
    python(clone, "python3", "3.9.18")
    done = make(clone, "serve")
    assert done.returncode != 0
    assert "No Python >= 3.11 found" in done.stderr
    assert "  python3: 3.9.18\n" in done.stderr
    assert "  python3.12: not there\n" in done.stderr
    assert "make serve PYTHON=/path/to/python3.12" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_python_that_is_named_is_the_only_one_looked_at(clone):
    python(clone, "python3.12", "3.12.1")
    old = python(clone, "old", "3.10.1")
    done = make(clone, "serve", f"PYTHON={old}")
    assert f"Looked at:\n  {old}: 3.10.1\n" in done.stderr


def test_a_python_without_venv_is_told_with_the_remedy(clone):
    python(clone, "python3", "3.12.1", can_make_environments=False)
    done = make(clone, "serve")
    assert done.returncode != 0
    assert "python3 cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" in done.stderr


def test_an_environment_whose_python_is_gone_is_made_and_filled_anew(clone):
    python(clone, "python3", "3.13.0")
    make(clone, "install")
    (clone / ".venv" / "bin" / "python").unlink()
    (clone / ".venv" / "bin" / "python").symlink_to("/nowhere/python3.12")
    done = make(clone, "serve")
    assert done.stdout.endswith("megakernel serve\n"), done.stderr
    assert len(installed(clone)) == 4


def test_what_is_no_environment_is_left_alone(clone):
    python(clone, "python3", "3.13.0")
    (clone / "mine").mkdir()
    (clone / "mine" / "precious").write_text("kept")
    done = make(clone, "serve", "VENV=mine")
    assert "mine is there and is no virtual environment; remove it" in done.stderr
    assert (clone / "mine" / "precious").read_text() == "kept"


def test_a_directory_with_a_space_in_its_name_is_served_from(clone, tmp_path_factory):
    spaced = tmp_path_factory.mktemp("spaced") / "a clone"
    shutil.copytree(clone, spaced, symlinks=True)
    python(spaced, "python3", "3.13.0")
    done = make(spaced, "serve")
    assert done.stdout.endswith("megakernel serve\n"), done.stderr


def test_help_lists_every_target_that_is_for_people(clone):
    shown = make(clone).stdout
    assert all(
        f"make {name} " in shown for name in ("serve", "chat", "test", "lint", "format", "bench", "docs", "clean")
    )


def test_a_real_python_makes_a_real_environment(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "VENV": str(tmp_path / "venv")}
    subprocess.run(["sh", ROOT / ".ci" / "make-venv"], env=environment, check=True, capture_output=True, timeout=100)
    done = subprocess.run([tmp_path / "venv" / "bin" / "python", "-m", "pip", "--version"], check=False, timeout=60)
    assert done.returncode == 0
