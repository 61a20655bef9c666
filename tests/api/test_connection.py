"""Bytes on the wire that no ordinary client sends: what is no HTTP, heads without end, connections half closed."""

import json
import socket
import time

import pytest

from server.api.connection import MAX_HEAD_BYTES, Connection
from tests.api.harness import VOCAB_SIZE, eventually, ids, make_plan, serving, text_script

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ENDLESS = {"emit": "cycle", "ids": ids("on "), "vocab_size": VOCAB_SIZE, "step_seconds": 0.002}


class Impatient(Connection):
    head_within_s = 0.3


@pytest.fixture
def served(serve):
    return serve(text_script("fine"))


@pytest.fixture
def impatient(tiny_path):
    with serving(make_plan(tiny_path, text_script("x" * 40, step_seconds=0.02)), connection=Impatient) as served:
        yield served


def connect(served):
    return socket.create_connection(("127.0.0.1", served.port), timeout=10)


def rest(sock):
    """All that comes until the server hangs up."""
    with sock.makefile("rb") as file:
        return file.read()


def request(body, *headers, path=CHAT):
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(content)}", *headers, "", ""]).encode() + content


def parsed(answer):
    """Status, headers and body of one response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def expect_refused(answer, says):
    status, headers, body = parsed(answer)
    assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
    assert len(headers["x-request-id"]) == 32
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_http", None)
    assert says in error["message"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: x\r\nodd: a\x00b\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",  # smuggling
    ],
)
def test_what_is_no_http_is_refused_in_the_one_form(served, sent):
    with connect(served) as sock:
        sock.sendall(sent)
        expect_refused(rest(sock), "no valid HTTP/1.1 request")


@pytest.mark.parametrize("piece", [b"x: " + b"a" * 65_000 + b"\r\n", b"a" * 65_000], ids=["many", "one"])
def test_a_head_without_end_is_refused(served, piece):
    with connect(served) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\nlong: ")
        received = b""
        try:
            for _ in range(200):
                sock.sendall(piece)
            received = rest(sock)
        except OSError:  # hung up while we were sending
            pass
        else:
            expect_refused(received, f"more than {MAX_HEAD_BYTES} bytes")
    assert served.http.get("/live").status_code == 200


def test_a_large_head_is_served(served):
    answer = served.http.get("/live", headers={f"x-{i}": "a" * 1000 for i in range(50)})
    assert answer.status_code == 200


@pytest.mark.parametrize("begun", [b"", b"GET /live HT", b"\r\n", b"GET /live HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_come_is_not_awaited(impatient, begun):
    with connect(impatient) as sock:
        sock.sendall(begun)
        started = time.monotonic()
        assert rest(sock) == b""
        assert 0.2 < time.monotonic() - started < 5


def test_a_second_head_is_not_awaited_either(impatient):
    with connect(impatient) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\nGET /li")
        assert b'{"status":"live"}' in rest(sock)


def test_an_answer_may_take_longer_than_a_head(impatient):
    with connect(impatient) as sock:
        sock.sendall(request({"messages": HI}, "connection: close"))
        _, _, body = parsed(rest(sock))
    assert json.loads(body)["choices"][0]["message"]["content"] == "x" * 40


def test_requests_in_one_go_are_answered_in_order(served):
    with connect(served) as sock:
        whole, stream = request({"messages": HI}), request({"messages": HI, "stream": True})
        sock.sendall(whole + stream + b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = rest(sock)
    first, second, third = answer.split(b"HTTP/1.1 200 OK")[1:]
    assert b'"content":"fine"' in first
    assert second.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert third.endswith(b'{"status":"live"}')


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_stops_sending_has_left(serve, stream):
    """A connection half closed cannot be told from one that is gone, and nobody shall generate for nobody."""
    served = serve(ENDLESS, spec={"max_slots": 1})
    with connect(served) as sock:
        sock.sendall(request({"messages": HI, "max_tokens": 10_000, "stream": stream}))
        eventually(lambda: served.engine.n_in_flight == 1)
        sock.shutdown(socket.SHUT_WR)
        rest(sock)
        eventually(lambda: served.engine.n_in_flight == 0)
    assert served.chat(max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("kind", ["websocket", "h2c"])
def test_upgrades_are_not_made(served, caplog, kind):
    with connect(served) as sock:
        sock.sendall(f"GET /live HTTP/1.1\r\nhost: x\r\nupgrade: {kind}\r\nconnection: upgrade\r\n\r\n".encode())
        assert b"200 OK" in sock.recv(10_000)
    assert not caplog.records


def test_a_body_may_wait_for_permission(served):
    with connect(served) as sock:
        content = json.dumps({"messages": HI}).encode()
        head = request({"messages": HI}, "expect: 100-continue", "connection: close").removesuffix(content)
        sock.sendall(head)
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(content)
        assert parsed(rest(sock))[0] == 200


def test_odd_targets_are_named_as_they_are(served):
    with connect(served) as sock:
        sock.sendall(b"GET /%00%ff%0d%0aset-cookie:x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        status, headers, body = parsed(rest(sock))
    assert (status, "set-cookie" in headers) == (404, False)
    assert "/\x00\ufffd\r\nset-cookie:x" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(("coding", "status"), [("identity", 200), ("gzip", 415), ("br, gzip", 415)])
def test_bodies_are_not_packed(served, coding, status):
    answer = served.post(CHAT, {"messages": HI}, headers={"content-encoding": coding})
    assert answer.status_code == status
    if status == 415:
        assert f"Content-Encoding is '{coding}'; send the body as it is" in answer.json()["error"]["message"]
