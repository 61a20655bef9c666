"""Bounds on bodies: size judged before reading, time to arrive, clients that leave in the middle."""

import json
import socket
import threading
import time

import pytest

from server.plan import Limits
from server.protocol.parse import parse_chat
from tests.api.harness import eventually, text_script

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def small(serve):
    return serve(text_script("fits"), limits=Limits(max_body_bytes=4096, body_timeout_seconds=0.3))


class Connection:
    """A socket to the server, spoken to by hand."""

    def __init__(self, served):
        self.sock = socket.create_connection(("127.0.0.1", served.port), timeout=10)
        self.file = self.sock.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        self.sock.close()

    def head(self, *headers):
        lines = [f"POST {CHAT} HTTP/1.1", "host: x", "content-type: application/json", *headers, "", ""]
        self.sock.sendall("\r\n".join(lines).encode())

    def answer(self):
        """The status, headers and error of the response."""
        status = int(self.file.readline().split()[1])
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = self.file.read(int(headers["content-length"]))
        return status, headers, json.loads(body).get("error")

    def closed(self):
        """Whether the server has hung up and said no more."""
        return self.file.read() == b""


def padded(n_bytes):
    body = json.dumps({"messages": HI, "user": ""}).encode()
    return body[:-2] + b"x" * (n_bytes - len(body)) + body[-2:]


def post(served, content):
    return served.http.post(CHAT, content=content, headers={"content-type": "application/json"})


def test_the_largest_body_that_may_be(small):
    assert post(small, padded(4096)).status_code == 200
    assert post(small, padded(4097)).status_code == 413


def test_eight_megabytes_by_default(serve):
    served = serve(text_script("fits"))
    assert post(served, padded(8 * 2**20)).status_code == 200
    answer = post(served, padded(8 * 2**20 + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == (
        "the body has 8388609 bytes or more; it must have at most 8388608: send less at once"
    )
    assert answer.json()["error"]["code"] == "request_too_large"


def test_a_declared_size_is_judged_before_a_byte_is_read(small):
    with Connection(small) as connection:
        connection.head("content-length: 1000000000")
        status, headers, error = connection.answer()
        assert (status, error["code"], headers["connection"]) == (413, "request_too_large", "close")
        assert connection.closed()


def test_an_undeclared_size_is_judged_while_reading(small):
    with Connection(small) as connection:
        connection.head("transfer-encoding: chunked")
        for _ in range(5):  # and no end
            connection.sock.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
        status, headers, error = connection.answer()
        assert (status, error["code"], headers["connection"]) == (413, "request_too_large", "close")


def test_a_body_that_does_not_come(small):
    with Connection(small) as connection:
        connection.head("content-length: 100")
        connection.sock.sendall(b"{")
        started = time.monotonic()
        status, headers, error = connection.answer()
        assert (status, error["code"], headers["connection"]) == (408, "request_timeout", "close")
        assert "within 0.3 s" in error["message"]
        assert 0.2 < time.monotonic() - started < 5
        assert connection.closed()


def test_a_client_that_leaves_before_its_body_is_there(small):
    def left():
        return small.metric("http_requests_total", handler=CHAT, status="499")

    before = left()
    with Connection(small) as connection:
        connection.head("content-length: 100")
        connection.sock.sendall(b"{")
    eventually(lambda: left() == before + 1)
    assert post(small, padded(200)).status_code == 200


def test_a_body_in_many_pieces(small):
    with Connection(small) as connection:
        body = padded(300)
        connection.head(f"content-length: {len(body)}", "connection: close")
        for start in range(0, len(body), 7):
            connection.sock.sendall(body[start : start + 7])
        status, _, error = connection.answer()
        assert (status, error) == (200, None)


def test_large_bodies_are_judged_beside_the_loop(serve, monkeypatch):
    """So that streams go on while a long prompt is tokenized."""
    served, threads = serve(text_script("fits")), []

    def noting(*arguments):
        threads.append(threading.current_thread().name)
        return parse_chat(*arguments)

    monkeypatch.setattr("server.api.generate.parse_chat", noting)
    for n_bytes in (200, 100_000):
        assert post(served, padded(n_bytes)).status_code == 200
    small, large = threads
    assert small == "api-server" != large


def test_one_connection_serves_many_requests(small):
    with Connection(small) as connection:
        for _ in range(3):
            body = padded(300)
            connection.head(f"content-length: {len(body)}")
            connection.sock.sendall(body)
            assert connection.answer()[0] == 200
