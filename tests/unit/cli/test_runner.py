"""The server's life as a process: loading is told, signals drain, exit codes are right. Through real processes and sockets."""

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from server.cli.runner import listen, url_of
from server.errors import ConfigError

PROGRAM = Path(__file__).with_name("runner_program.py")
WITHIN_S = 30.0


class Server:
    """The program as a child; its stderr is waited on line by line."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stderr=subprocess.PIPE, text=True)
        self.lines, self.seen = queue.Queue(), []
        self.reader = threading.Thread(target=lambda: [self.lines.put(line) for line in self.process.stderr])
        self.reader.start()

    def wait_for(self, text):
        """Return the first new line that holds `text`."""
        deadline = time.monotonic() + WITHIN_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self.lines.get(timeout=left)
            except queue.Empty:
                break
            self.seen.append(line)
            if text in line:
                return line
        pytest.fail(f"{text!r} was never said: {self.seen}")

    def url(self):
        return json.loads(self.wait_for('"event": "ready"'))["url"]

    def get(self, path):
        """Begin a request; return a thread and the list that its answer arrives in."""
        answers = []

        def ask():
            try:
                answers.append(httpx.get(path, timeout=WITHIN_S, trust_env=False))
            except httpx.TransportError as error:
                answers.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        return thread, answers

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stderr.close()


@pytest.fixture
def start():
    servers = []

    def run(*arguments):
        servers.append(Server(*arguments))
        return servers[-1]

    yield run
    for server in servers:
        server.close()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end_and_exits_with_0(start, sig):
    server = start("20")
    url = server.url()
    thread, answers = server.get(f"{url}/slow")
    server.wait_for("slow began")
    server.process.send_signal(sig)
    assert json.loads(server.wait_for('"event": "draining"'))["signal"] == sig.name
    thread.join(WITHIN_S)
    assert answers[0].json() == "done"
    server.wait_for("lifespan ended")
    assert server.process.wait(WITHIN_S) == 0


def test_the_drain_has_an_end(start):
    server = start("0.2")
    url = server.url()
    thread, answers = server.get(f"{url}/never")
    server.wait_for("never began")
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("drain ran out of time")
    assert server.process.wait(WITHIN_S) == 0
    thread.join(WITHIN_S)
    assert answers


def test_a_second_signal_exits_at_once(start):
    server = start("1000")
    url = server.url()
    thread, answers = server.get(f"{url}/never")
    server.wait_for("never began")
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WITHIN_S) == 0
    thread.join(WITHIN_S)
    assert answers


def test_loading_is_told_before_ready(start):
    server = start("1")
    server.url()
    events = [json.loads(line) for line in server.seen if line.startswith("{")]
    phases = [(event["event"], event.get("phase")) for event in events if "phase" in event]
    assert phases == [("phase started", "weights"), ("phase finished", "weights")]


def test_an_engine_that_cannot_come_up_ends_the_server(start):
    server = start("1", "fail")
    server.wait_for("EngineFailed: no memory")
    assert server.process.wait(WITHIN_S) == 1


def test_a_taken_port_is_told_with_a_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: .*choose another with --port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["256.1.1.1", "no-such-host.invalid"])
def test_an_address_that_is_none_is_told(host):
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(host, 0)


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1")]
)
def test_the_url_is_one_that_works_here(host, shown):
    with listen(host, 0) as listener:
        assert url_of(listener) == f"http://{shown}:{listener.getsockname()[1]}"


def test_the_url_of_an_ipv6_socket_has_brackets():
    class Listener:
        def getsockname(self):
            return ("::", 8000, 0, 0)

    assert url_of(Listener()) == "http://[::1]:8000"
