"""The command itself: help, exit codes, and the small commands, run as a user runs them."""

import json
import subprocess
import sys
import time

import pytest

COMMANDS = ("serve", "chat", "pull", "models", "check", "bench", "version")


@pytest.fixture
def megakernel(tmp_path, monkeypatch):
    """Run the command with empty configuration and cache directories; return the finished process."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments, **kwargs):
        command = [sys.executable, "-m", "server.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **kwargs)

    return run


@pytest.fixture
def own_model(tmp_path):
    """A model of the operator's own, with an entry."""
    model, entries = tmp_path / "weights", tmp_path / "config" / "megakernel" / "models"
    model.mkdir()
    (model / "config.json").write_text("{}")
    entries.mkdir(parents=True)
    text = (
        f'name = "mine"\ndescription = "My [own] model"\nparameters = "1M"\n[source]\nkind = "path"\npath = "{model}"\n'
    )
    (entries / "mine.toml").write_text(text)
    return model


def test_help_lists_every_command(megakernel):
    done = megakernel("--help")
    assert done.returncode == 0
    assert all(f" {name} " in done.stdout for name in COMMANDS)


def test_no_arguments_show_help(megakernel):
    assert "Usage" in megakernel().stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(megakernel, command):
    done = megakernel(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: python -m server.cli {command}" in done.stdout


def test_help_comes_at_once(megakernel):
    """Under half a second on a quiet machine; the bound leaves room for a busy one, not for importing torch."""

    def seconds():
        began = time.perf_counter()
        megakernel("--help")
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < 1.0


@pytest.mark.parametrize("arguments", [("version",), ("--version",)])
def test_version(megakernel, arguments):
    from server.version import version

    assert megakernel(*arguments).stdout == f"megakernel {version()}\n"


def test_models_shows_what_is_here(megakernel, own_model):
    done = megakernel("models")
    assert "smollm2-135m" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("mine")]
    assert "✓" in line
    assert "My [own] model" in line


def test_models_as_json(megakernel, own_model):
    rows = {row["name"]: row for row in json.loads(megakernel("models", "--json").stdout)}
    assert rows["mine"]["here"] is True
    assert rows["smollm2-135m"]["here"] is False
    assert rows["smollm2-135m"]["size"] == "94 MiB"


def test_pull_prints_where_the_model_is(megakernel, own_model):
    done = megakernel("pull", "mine")
    assert (done.returncode, done.stdout) == (0, f"{own_model}\n")


def test_an_unknown_model_is_told_with_the_nearest(megakernel):
    done = megakernel("pull", "smolm2-135m")
    assert done.returncode == 1
    assert "did you mean 'smollm2-135m'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "env", "told"),
    [
        (("--port", "70000"), {}, "--port is 70000"),
        ((), {"MEGAKERNEL_PROT": "1"}, "did you mean 'port'?"),
        (("--config", "absent.toml"), {}, "config file absent.toml does not exist"),
        (("--host", "256.0.0.1"), {}, "cannot listen on 256.0.0.1"),
    ],
)
def test_serve_refuses_bad_settings_with_exit_code_2(megakernel, arguments, env, told):
    import os

    done = megakernel("serve", *arguments, env={**os.environ, **env})
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_without_a_server_is_told(megakernel):
    done = megakernel("chat", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no server answers at http://127.0.0.1:9" in done.stderr


def test_check_tells_that_models_are_missing(megakernel):
    done = megakernel("check", "--json")
    topics = {finding["topic"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0
    assert topics["backend cpu"]["state"] == "ok"
    assert topics["Models"]["state"] == "note"


@pytest.mark.parametrize(
    ("name", "option"),
    [("startup", "--limit-s"), ("cpu", "--formats"), ("http", "--streams"), ("decode", "--gpu-hour-cost")],
)
def test_benchmarks_take_their_own_options(megakernel, name, option):
    done = megakernel("bench", name, "--help")
    assert done.returncode == 0, done.stderr
    assert option in done.stdout


def test_an_error_is_one_line_for_people(megakernel):
    done = megakernel("serve", "no-such-model")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no model is called 'no-such-model'")
