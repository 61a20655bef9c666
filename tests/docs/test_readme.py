"""The README's commands work as they are written: `make serve`, then curl, then the openai client, on a free port.

Only the port differs from the page, so that a server that runs already is not in the way.
"""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE_URL = "http://127.0.0.1:8000"
READY_WITHIN_S = 300.0

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(600)]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block_after(text):
    """The fenced block that follows `text`."""
    return re.search(r"```\w*\n(.*?)```", README[README.index(text) + len(text) :], re.DOTALL)[1]


@pytest.fixture(scope="module")
def url(real_model_path):
    """A server started by `make serve`, as a stranger would start it."""
    assert "make serve\n" in blocks("bash")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(["make", "serve", f"PORT={port}"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_ready(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def wait_ready(url, process):
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)  # between looks at a port: there is no event to wait for from outside
    pytest.fail(f"not ready within {READY_WITHIN_S} s")


def curl_blocks():
    return [block for block in blocks("bash") if block.startswith("curl ")]


@pytest.mark.parametrize("command", curl_blocks(), ids=lambda command: command.split()[1])
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_examples_answer_as_shown(url, command):
    done = subprocess.run(
        ["bash", "-c", command.replace(PAGE_URL, url)], capture_output=True, text=True, timeout=120, check=True
    )
    answer, shown = json.loads(done.stdout), json.loads(block_after(command))
    assert shape(answer) == shape(shown)
    assert answer["choices"][0]["message"]["content"].strip()


def shape(value):
    """What a JSON value is made of: keys and types, not the values, which hold times and ids."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__


def test_the_openai_example_streams_an_answer(url):
    (code,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", code.replace(PAGE_URL, url)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip()
    assert block_after(code).strip()


def test_curl_and_client_examples_ask_the_same(url):
    """Greedy answers are repeatable: the streamed text is the whole text."""
    (code,) = blocks("python")
    streamed = subprocess.run(
        [sys.executable, "-c", code.replace(PAGE_URL, url)], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    body = json.loads(re.search(r"-d '(.*)'", curl_blocks()[0], re.DOTALL)[1])
    whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
    assert whole["choices"][0]["message"]["content"] == streamed


def test_chat_answers_and_counts(url):
    command = [sys.executable, "-m", "server.cli", "chat", "--url", url, "--max-tokens", "8", "--temperature", "0"]
    done = subprocess.run(command, input="Hello\n/quit\n", capture_output=True, text=True, timeout=120, check=True)
    assert "tokens/s" in done.stdout
    assert "first token" in done.stdout


def test_metrics_are_there_to_be_watched(url):
    from prometheus_client.parser import text_string_to_metric_families

    from server.telemetry.families import FAMILIES

    text = httpx.get(f"{url}/metrics", trust_env=False).text
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {family.name.removesuffix("_total") for family in FAMILIES} <= {n.removesuffix("_total") for n in names}
