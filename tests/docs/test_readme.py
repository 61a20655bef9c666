"""The README's commands work as they are written: `make serve`, then curl, then the openai client, on a free port.

Only the port differs from the page, so that a server that runs already is not in the way.
"""

import json
import os
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

# As from a shell: what was said to a `make` that runs these tests is not for those that they run.
SHELL = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("MAKE", "MFLAGS", "ARGS", "PORT", "MODEL"))
}

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(600)]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block_after(text):
    """The fenced block that follows `text`."""
    return re.search(r"```\w+\n(.*?)```", README[README.index(text) + len(text) :], re.DOTALL)[1]


(CURL,) = [block for block in blocks("bash") if block.startswith("curl ")]
(PYTHON,) = blocks("python")


@pytest.fixture(scope="module")
def url(real_model_path, tmp_path_factory):
    """A server started by `make serve`, as a stranger would start it."""
    assert "make serve\n" in blocks("bash")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("readme") / "log"  # a file: a pipe that nobody reads would fill up
    with log.open("w") as said:
        process = subprocess.Popen(["make", "serve", f"PORT={port}"], cwd=ROOT, env=SHELL, stdout=said, stderr=said)
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)  # with make's own code for a signal


def wait_ready(url, process, log):
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)  # between looks at a port: there is no event to wait for from outside
    pytest.fail(f"not ready within {READY_WITHIN_S} s: {log.read_text()}")


def run_example(url):
    command = [sys.executable, "-c", PYTHON.replace(PAGE_URL, url)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_example_answers_as_shown(url):
    command = CURL.replace(PAGE_URL, url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    answer, shown = json.loads(done.stdout), json.loads(block_after(CURL))
    assert shape(answer) == shape(shown)
    assert answer["choices"] == shown["choices"]
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [answer["usage"][name] for name in counted] == [shown["usage"][name] for name in counted]


def shape(value):
    """What a JSON value is made of: keys and types, not the values, which hold times and ids."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__


def test_the_openai_example_streams_what_is_shown(url):
    assert run_example(url).strip() == block_after(PYTHON).strip()


def test_what_is_streamed_is_the_whole_answer(url):
    """Greedy answers are repeatable, streamed or not."""
    question = re.search(r'"content": "(.*?)"', PYTHON)[1]
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": question}], "temperature": 0}
    whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
    assert whole["choices"][0]["message"]["content"] == run_example(url)


def test_make_chat_answers_and_counts(url):
    options = f"--url {url} --max-tokens 8 --temperature 0"
    done = subprocess.run(
        ["make", "chat", f"ARGS={options}"],
        cwd=ROOT,
        env=SHELL,
        input="Hello\n/quit\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "tokens/s" in done.stdout
    assert "first token" in done.stdout


def test_metrics_are_there_to_be_watched(url):
    from prometheus_client.parser import text_string_to_metric_families

    from server.telemetry.families import FAMILIES

    text = httpx.get(f"{url}/metrics", trust_env=False).text
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {family.name.removesuffix("_total") for family in FAMILIES} <= {n.removesuffix("_total") for n in names}


@pytest.mark.parametrize(
    "arguments", [("models",), ("models", "--json"), ("pull", "smollm2-135m"), ("check",)], ids=" ".join
)
def test_the_command_does_what_the_table_says(url, arguments):
    """`check` and `models` print; `pull` finds the model fetched, since it is being served."""
    done = subprocess.run(
        [ROOT / ".venv" / "bin" / "megakernel", *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    assert "smollm2-135m" in done.stdout
