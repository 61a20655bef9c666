"""What the start-up shows to people and to log collectors."""

import io
import json
import logging
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from megakernel_runtime.interface import RuntimeSpec
from server.cli import startup
from server.cli.console import size
from server.cli.startup import ConsoleDisplay, LogDisplay, curl_line, describe, make_display
from server.engine.messages import Hello
from server.plan import ServePlan
from server.scheduling.settings import SchedulerSettings
from server.telemetry.logging import JsonFormatter

URL = "http://127.0.0.1:8000"
HELLO = Hello(
    version=1,
    max_model_len_tokens=2048,
    vocab_size=49152,
    max_slots=16,
    n_pages=512,
    page_size_tokens=16,
    backend="cpu",
    device="CPU, 2 threads",
    model="LlamaForCausalLM 135M",
    weight_bytes=270 * 2**20,
    kv_bytes=3 * 2**30,
)


@pytest.fixture
def plan():
    return ServePlan(
        host="127.0.0.1",
        port=8000,
        served_names=("it's-small", "alias"),
        model_path=Path("model.gguf"),
        runtime=RuntimeSpec(backend="auto", model_path="model.gguf"),
        scheduler=SchedulerSettings(),
        api_keys=("sesame",),
    )


def shown(display_calls, plan):
    console = Console(file=io.StringIO(), width=120)
    with ConsoleDisplay(console) as display:
        for call in display_calls:
            display(*call)
        display.ready(plan, HELLO, URL)
    return console.file.getvalue()


def test_people_see_phases_plan_and_a_curl_line(plan):
    text = shown([("fetch", 1, 2), ("fetch", 2, 2), ("weights", 0, 0)], plan)
    assert text.index("✓ Fetch") < text.index("✓ Weights") < text.index("Ready at")
    for fact in (
        "LlamaForCausalLM 135M",
        "CPU, 2 threads",
        "2,048 tokens",
        "8,192 tokens (512 pages of 16, 3.0 GiB)",
        "270 MiB",
    ):
        assert fact in text
    assert curl_line(plan, URL) in text


def test_keys_are_never_shown(plan):
    assert "sesame" not in shown([], plan)
    assert "sesame" not in repr(plan)
    assert describe(plan, HELLO)["access"] == "with an API key (1 known)"


def test_the_logged_plan_withholds_nothing(plan, caplog):
    """No name in it looks like a secret's, which the log would not show."""
    with caplog.at_level(logging.INFO), LogDisplay() as display:
        display.ready(plan, HELLO, URL)
    assert "withheld" not in JsonFormatter().format(caplog.records[-1])


def test_the_curl_line_is_valid_shell_and_json(plan):
    words = shlex.split(curl_line(plan, URL).replace("\\\n", " "))
    assert words[:3] == ["curl", "-N", f"{URL}/v1/chat/completions"]
    assert "Authorization: Bearer YOUR_KEY" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's-small"


def test_machines_get_one_record_a_change(plan, caplog):
    with caplog.at_level(logging.INFO), LogDisplay() as display:
        for call in [("fetch", 1, 2), ("fetch", 2, 2), ("weights", 0, 0)]:
            display(*call)
        display.ready(plan, HELLO, URL)
    told = [(record.getMessage(), getattr(record, "phase", None)) for record in caplog.records]
    assert told == [
        ("phase started", "fetch"),
        ("phase finished", "fetch"),
        ("phase started", "weights"),
        ("phase finished", "weights"),
        ("ready", None),
    ]
    assert caplog.records[-1].url == URL
    assert caplog.records[-1].backend == "cpu"


def test_a_long_phase_is_told_now_and_then(plan, caplog, monkeypatch):
    monkeypatch.setattr(startup, "TELL_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO), LogDisplay() as display:
        display("fetch", 1, 3)
        display("fetch", 2, 3)
    assert (caplog.records[-1].getMessage(), caplog.records[-1].done, caplog.records[-1].total) == (
        "phase goes on",
        2,
        3,
    )


def test_the_log_format_picks_the_display():
    console = Console(file=io.StringIO())
    assert isinstance(make_display("json", console), LogDisplay)
    assert isinstance(make_display("console", console), ConsoleDisplay)


@pytest.mark.parametrize(("n_bytes", "text"), [(0, "0 MiB"), (270 * 2**20, "270 MiB"), (int(1.5 * 2**30), "1.5 GiB")])
def test_sizes(n_bytes, text):
    assert size(n_bytes) == text
