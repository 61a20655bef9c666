"""The engine's socket: who may open it, what happens to connections that misbehave."""

import random
import socket
import stat

import pytest

from server.engine import listener as module
from server.engine.listener import Listener
from server.engine.messages import Cancel, Failed, Loading
from server.engine.wire import api_reader, encode


@pytest.fixture
def listener(tmp_path):
    listener = Listener(tmp_path / "engine")
    yield listener
    listener.close(1.0)


@pytest.fixture
def connect(listener, tmp_path):
    sockets = []

    def connect():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(5)
        sock.connect(str(tmp_path / "engine"))
        sockets.append(sock)
        assert listener.receive(5.0) == []  # accepted
        return sock

    yield connect
    for sock in sockets:
        sock.close()


def frame(message):
    out = bytearray()
    encode(message, out)
    return bytes(out)


def test_only_this_user_may_open_it(listener, tmp_path):
    assert stat.S_IMODE((tmp_path / "engine").stat().st_mode) == 0o600
    assert listener.n_connections == 0


def test_messages_come_with_their_connection(listener, connect):
    first, second = connect(), connect()
    second.sendall(frame(Cancel("b")))
    assert listener.receive(5.0) == [(2, Cancel("b"))]
    first.sendall(frame(Cancel("a")) + frame(Cancel("c")))
    assert listener.receive(5.0) == [(1, Cancel("a")), (1, Cancel("c"))]


def test_answers_go_to_their_connection_and_broadcasts_to_all(listener, connect):
    first, second = connect(), connect()
    listener.send(2, Failed("b", "x"))
    listener.broadcast(Loading("weights", 1, 2))
    listener.send(3, Failed("nobody", "x"))
    listener.flush()
    assert api_reader().feed(first.recv(1000)) == [Loading("weights", 1, 2)]
    assert api_reader().feed(second.recv(1000)) == [Failed("b", "x"), Loading("weights", 1, 2)]


def test_a_new_connection_is_greeted(listener, connect):
    listener.greeting = Loading("start")
    sock = connect()
    listener.flush()
    assert api_reader().feed(sock.recv(1000)) == [Loading("start")]


def test_one_that_hangs_up_is_reported_once(listener, connect):
    connect().close()
    assert listener.receive(5.0) == [(1, None)]
    assert listener.receive(0.0) == []
    assert listener.n_connections == 0


def test_garbage_ends_that_connection_alone(listener, connect):
    good, rng = connect(), random.Random(0)
    for number in range(2, 60):
        bad = connect()
        bad.sendall(b"\x05\x00\x00\x00" + rng.randbytes(rng.randrange(5, 100)))
        assert (number, None) in listener.receive(5.0)
        assert bad.recv(10) == b""
    good.sendall(frame(Cancel("a")))
    assert listener.receive(5.0) == [(1, Cancel("a"))]


def test_a_slow_reader_gets_everything_in_the_end(listener, connect):
    sock, message = connect(), Failed("a", "x" * 100_000)
    for _ in range(50):
        listener.send(1, message)
        listener.flush()
    reader, got = api_reader(), []
    while len(got) < 50:
        got += reader.feed(sock.recv(1_000_000))
        listener.receive(0.0)
        listener.flush()
    assert got == [message] * 50


def test_one_that_never_reads_is_given_up(listener, connect, monkeypatch):
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 1_000_000)
    connect()
    for _ in range(50):
        listener.send(1, Failed("a", "x" * 100_000))
        listener.flush()
        listener.receive(0.0)
    assert listener.n_connections == 0


def test_one_that_vanishes_while_it_is_written_to(listener, connect):
    connect().close()
    listener.send(1, Failed("a", "x"))
    listener.flush()
    assert listener.receive(1.0) == [(1, None)]


def test_the_last_words_are_sent_on_closing(tmp_path):
    listener = Listener(tmp_path / "other")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(tmp_path / "other"))
        listener.receive(5.0)
        listener.send(1, Failed("a", "the end"))
        listener.close(1.0)
        assert api_reader().feed(sock.recv(1000)) == [Failed("a", "the end")]
    assert not (tmp_path / "other").exists()


def test_the_socket_of_an_engine_that_died_is_replaced(tmp_path):
    (tmp_path / "left").touch()
    Listener(tmp_path / "left").close(1.0)
    assert not (tmp_path / "left").exists()
