"""A child server: waited for, told about, and ended, whatever it does."""

import os
import signal
import subprocess
import sys

import pytest

from server.cli.child import ChildError, child_server

WELL = """
import json, os, signal, sys, time
def say(**record): print(json.dumps(record), file=sys.stderr, flush=True)
say(level="info", event="phase started", phase="load")
say(level="info", event="ready", url="http://127.0.0.1:4711", pid=os.getpid(), argv=sys.argv[1:])
signal.sigwait([signal.SIGTERM])
"""
DEAF = WELL.replace("def say", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ndef say").replace(
    "[signal.SIGTERM]", "[signal.SIGUSR1]"
)
ERROR = (
    'import json, sys; print(json.dumps({"level": "error", "event": "no such model"}), file=sys.stderr); sys.exit(2)'
)
CRASH = 'raise RuntimeError("broken install")'
SILENT = "pass"


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def started(monkeypatch):
    """The processes that child_server started."""
    processes = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr("server.cli.child.subprocess.Popen", Recorded)
    return processes


def serve(program, phases=None):
    told = phases if phases is not None else []
    return child_server(("--model", "x"), told.append, program=(sys.executable, "-c", program))


def test_yields_when_ready_and_ends_the_child(started):
    phases = []
    with serve(WELL, phases) as server:
        assert server.url == "http://127.0.0.1:4711"
        assert len(server.api_key) > 20
        assert alive(started[0].pid)
        assert started[0].args[-8:] == ["--model", "x", "--host", "127.0.0.1", "--port", "0", "--log-format", "json"]
    assert phases == ["load"]
    assert started[0].returncode is not None


def test_ends_the_child_when_the_block_raises(started):
    with pytest.raises(KeyboardInterrupt), serve(WELL):
        raise KeyboardInterrupt
    assert started[0].returncode is not None


def test_a_child_that_does_not_heed_is_killed(started, monkeypatch):
    monkeypatch.setattr("server.cli.child.STOP_WITHIN_S", 0.2)
    with serve(DEAF):
        pass
    assert started[0].returncode == -9


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (ERROR, "exit code 2: no such model"),
        (CRASH, "exit code 1: RuntimeError: broken install"),
        (SILENT, "exit code 0: it said nothing"),
    ],
)
def test_a_child_that_ends_early_is_quoted(started, program, told):
    with pytest.raises(ChildError, match=told), serve(program):
        pytest.fail("yielded without a ready server")
    assert started[0].returncode is not None


def test_a_child_that_is_never_ready_is_given_up(started, monkeypatch):
    monkeypatch.setattr("server.cli.child.READY_WITHIN_S", 0.3)
    with pytest.raises(ChildError, match="not ready within"), serve("import signal; signal.pause()"):
        pytest.fail("yielded without a ready server")
    assert started[0].returncode is not None


PARENT = """
import sys
from server.cli.child import child_server
with child_server((), lambda phase: None, program=(sys.executable, "-c", sys.argv[1])) as server:
    print("ready", flush=True)
    sys.stdin.read()
"""
TELLING = WELL.replace("url=", "pid=print(os.getpid(), file=open(os.environ['TOLD'], 'w'), flush=True), url=").replace(
    ", pid=os.getpid()", ""
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_parent_that_is_told_to_end_ends_its_child(tmp_path, number):
    """Also when its terminal is closed: the child has no part in that."""
    told = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, TELLING]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | {"TOLD": str(told)}}
    with subprocess.Popen(command, **pipes) as parent:
        assert parent.stdout.readline() == b"ready\n"
        child = int(told.read_text())
        assert alive(child)
        parent.send_signal(number)
        assert parent.wait(30) == 128 + number
    assert not alive(child)
