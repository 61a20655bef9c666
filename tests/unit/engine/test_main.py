"""The engine process before it serves, run in this process: what it tells while it loads, and how it ends."""

import json
import socket

import pytest

from megakernel_runtime.interface import RuntimeSpec
from server.engine import client, main
from server.engine.listener import Listener
from server.engine.messages import Drain, LoadFailed, Loading, Rejected
from server.engine.spec import EXIT_LOAD_FAILED, EngineSpec, decode_spec, encode_spec
from server.engine.wire import api_reader, encode
from server.scheduling.settings import SchedulerSettings
from tests.unit.engine.conftest import ask


@pytest.fixture
def engine(tmp_path):
    """A maker of (engine that has not begun to load, connection to it)."""
    ends = []

    def make(**script):
        listener = Listener(tmp_path / "engine")
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.settimeout(5)
        end.connect(str(tmp_path / "engine"))
        ends.extend((end, listener))
        spec = EngineSpec(RuntimeSpec("fake", "", fake_script=json.dumps(script)), SchedulerSettings())
        return main.Engine(spec, listener), end

    yield make
    for end in ends:
        end.close(*([0.1] if isinstance(end, Listener) else []))


def send(end, message):
    frame = bytearray()
    encode(message, frame)
    end.sendall(frame)


def test_the_spec_survives_its_journey():
    spec = EngineSpec(
        RuntimeSpec("cpu", "/m", threads=2), SchedulerSettings(prefix_cache=False), 5.0, "debug", "console"
    )
    assert decode_spec(encode_spec(spec)) == spec


def test_while_it_loads_requests_are_turned_away(engine):
    loading, end = engine(load_seconds=0.1)
    send(end, ask("early"))
    loading._load()
    told = api_reader().feed(end.recv(10_000))
    assert told[0] == Loading("start")
    assert [(m.request_id, m.reason) for m in told if isinstance(m, Rejected)] == [("early", "not_ready")]
    assert told[-1] == Loading("weights", 1, 1)


def test_while_it_loads_a_drain_ends_it(engine):
    loading, end = engine(load_seconds=5)
    send(end, Drain())
    with pytest.raises(SystemExit) as ended:
        loading._load()
    assert ended.value.code == 0


def test_why_it_cannot_load_is_heard_before_it_ends(engine, monkeypatch):
    monkeypatch.setattr(main, "HEARD_WITHIN_S", 0.3)  # this connection does not hang up
    loading, end = engine(model_error="truncated")
    assert loading.run() == EXIT_LOAD_FAILED
    assert api_reader().feed(end.recv(10_000))[-1] == LoadFailed("truncated")


def test_a_path_too_long_for_a_socket_is_avoided(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(client.tempfile, "tempdir", str(deep))
    chosen = client._private_directory()
    assert len(bytes(chosen / "engine")) <= client.MAX_SOCKET_PATH
    assert list(deep.iterdir()) == []
    chosen.rmdir()
