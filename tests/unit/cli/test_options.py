"""Flags are made from the settings: all of them, with help, panel and default."""

import pytest
import typer
from typer.testing import CliRunner

from server.cli.options import flag_name, settings_flags, shown_default
from server.settings import Settings


@pytest.fixture
def run():
    """Run the made command; return what it was called with and what was printed."""

    def invoke(*arguments, only=()):
        calls = []

        def command(flags: dict[str, object]) -> None:
            """Do it."""
            calls.append(flags)

        app = typer.Typer()
        app.command("it")(settings_flags(command, only=only))
        app.callback()(lambda: None)
        result = CliRunner().invoke(app, ["it", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
        return calls, result

    return invoke


def test_every_setting_is_a_flag_with_help(run):
    _, result = run("--help")
    for name, field in Settings.model_fields.items():
        assert flag_name(name) in result.output
        assert str(field.description).split(";")[0].rstrip(".") in result.output, name


def test_only_given_flags_are_passed_on(run):
    calls, result = run("--port", "3", "--no-prefix-cache", "--api-key", "a", "--api-key", "b", "--config", "x.toml")
    assert result.exit_code == 0, result.output
    given = {name: str(value) if name == "config" else value for name, value in calls[0].items()}
    assert given == {"port": 3, "prefix_cache": False, "api_key": ["a", "b"], "config": "x.toml"}


def test_no_flag_passes_nothing(run):
    assert run()[0] == [{}]


def test_a_mistyped_flag_is_answered_with_the_nearest(run):
    calls, result = run("--prot", "3")
    assert (calls, result.exit_code) == ([], 2)
    assert "--port" in result.output


@pytest.mark.parametrize("arguments", [("--port", "x"), ("--backend", "gpu"), ("--log-level", "loud")])
def test_a_value_of_the_wrong_kind_is_refused(run, arguments):
    calls, result = run(*arguments)
    assert (calls, result.exit_code) == ([], 2)
    assert arguments[0] in result.output


def test_a_command_may_take_some_settings_only(run):
    _, result = run("--help", only=("cache_dir",))
    assert "--cache-dir" in result.output
    assert "--port" not in result.output


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("port", "8000"),
        ("drain_seconds", "30"),
        ("prefix_cache", "on"),
        ("random_weights", "off"),
        ("cache_dir", "~/.cache/megakernel"),
        ("api_key", ""),
        ("config", ""),
        ("max_body", "8.0MiB"),
        ("kv_memory", "0"),
    ],
)
def test_defaults_are_shown_as_typed(name, shown):
    assert shown_default(Settings.model_fields[name]) == shown
