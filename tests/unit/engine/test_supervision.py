"""Engines that die, hang, fail and drain: real processes, real signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from server.engine.messages import Failed, Rejected, Tokens
from server.engine.supervisor import Supervision
from tests.unit.engine.conftest import ask, everything

SLOW = {"step_seconds": 0.005}


async def begin(client, request):
    """Start a request; return a task for all its replies, once the first has come."""
    stream = client.submit(request)
    first = await anext(stream)

    async def rest():
        return [first] + [reply async for reply in stream]

    return asyncio.create_task(rest())


def gone(pid):
    """Whether a process has ended (it may wait to be collected by a parent that is not ours)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def wait_until(condition, within_s=10.0):
    """Look often: what is waited for happens in another process."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        await asyncio.sleep(0.01)


async def comes_back(client):
    """The requests of another life are served."""
    assert await asyncio.wait_for(client.wait_for("ready"), 15) == "ready"
    replies = await everything(client, ask("again", max_tokens=1))
    assert [reply.finish for reply in replies] == ["length"]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSEGV])
async def test_killed_in_mid_stream(engine, sent):
    client = await engine(SLOW)
    states = []
    client.on_state(states.append)
    running = [await begin(client, ask(str(i), max_tokens=20_000)) for i in range(3)]
    os.kill(client.pid, sent)
    for replies in await asyncio.wait_for(asyncio.gather(*running), 10):
        assert isinstance(replies[0], Tokens)
        assert isinstance(replies[-1], Failed)
        assert "try again: it ended unexpectedly" in replies[-1].message
    (reply,) = await everything(client, ask("meanwhile"))
    assert isinstance(reply, Rejected)
    assert (reply.reason, reply.retry_after_s) == ("not_ready", 2.0)
    await comes_back(client)
    assert states == ["restarting", "ready"]
    assert client.restarts == 1


async def test_stopped_it_is_taken_for_dead_and_replaced(engine):
    client = await engine(SLOW)
    first = client.pid
    running = await begin(client, ask(max_tokens=20_000))
    os.kill(first, signal.SIGSTOP)
    assert isinstance((await asyncio.wait_for(running, 10))[-1], Failed)
    await comes_back(client)
    await wait_until(lambda: gone(first))
    assert client.pid != first


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"fault_at_step": 3}, "scripted fault in step 3"),
        ({"stall_at_step": 3}, "no step for 2 s"),
        ({"hang_at_step": 3}, "try again: it ended unexpectedly"),
        ({"exit_at_step": 3}, "try again: it ended unexpectedly"),
    ],
)
async def test_whatever_befalls_a_step(engine, script, words):
    client = await engine(script)
    replies = await asyncio.wait_for(everything(client, ask(max_tokens=9)), 15)
    assert [type(reply) for reply in replies] == [Tokens, Tokens, Failed]
    assert words in replies[-1].message
    await comes_back(client)


@pytest.mark.parametrize("kind", ["model_error", "capacity_error"])
async def test_a_model_that_cannot_be_served_is_not_tried_again(engine, kind):
    client = await engine({kind: "tensor x of model.gguf is missing"}, ready=False)
    assert await asyncio.wait_for(client.wait_for("ready"), 10) == "failed"
    assert client.failure == "tensor x of model.gguf is missing"
    assert (client.restarts, client.hello) == (0, None)
    (reply,) = await everything(client, ask())
    assert isinstance(reply, Rejected)
    assert "tensor x of model.gguf is missing" in reply.message
    await client.drain(1.0)
    assert client.state == "failed"


async def test_starts_that_fail_for_no_known_reason_are_given_up_after_some(engine):
    client = await engine(ready=False, supervision={"max_failed_starts": 2}, page_size_tokens="no number")
    assert await asyncio.wait_for(client.wait_for("ready"), 20) == "failed"
    assert "the engine ended 2 times before it was ready" in client.failure
    assert client.restarts == 1


async def test_a_load_that_says_nothing_for_too_long_is_ended(engine):
    client = await engine(
        {"load_seconds": 20}, ready=False, supervision={"load_timeout_s": 0.4, "max_failed_starts": 1}
    )
    await wait_until(lambda: client.loading is not None and client.loading.phase == "weights")
    os.kill(client.pid, signal.SIGSTOP)
    assert await asyncio.wait_for(client.wait_for("ready"), 20) == "failed"
    assert "exit status -9" in client.failure


async def test_pauses_grow_and_are_forgotten_after_a_stable_spell(engine):
    limits = {"first_pause_s": 0.01, "longest_pause_s": 0.03, "stable_after_s": 0.0}
    client = await engine(supervision=limits)
    supervisor = client._supervisor
    assert [supervisor._next_pause() for _ in range(2)] == [0.01, 0.01]
    supervisor._ready_at = None  # it never got so far
    assert [supervisor._next_pause() for _ in range(4)] == [0.02, 0.03, 0.03, 0.03]


def test_a_hang_timeout_shorter_than_the_signs_of_life_is_refused():
    with pytest.raises(ValueError, match=r"hang_timeout_s is 1; .* at least 2"):
        Supervision(hang_timeout_s=1.0)


class TestDrain:
    async def test_what_runs_and_waits_is_finished(self, engine):
        client = await engine(SLOW, max_slots=1)
        pid = client.pid
        running = await begin(client, ask("a", max_tokens=50))
        waiting = asyncio.create_task(everything(client, ask("b", max_tokens=10)))
        await asyncio.sleep(0)  # let it be sent
        draining = asyncio.create_task(client.drain(10.0))
        await asyncio.sleep(0)
        (late,) = await everything(client, ask("late"))
        assert (client.state, late.reason) == ("draining", "draining")
        assert (await running)[-1].finish == (await waiting)[-1].finish == "length"
        await draining
        assert gone(pid)
        assert (client.state, client.pid) == ("draining", None)

    async def test_no_longer_than_it_may(self, engine):
        client = await engine(SLOW)
        running = await begin(client, ask(max_tokens=20_000))
        started = time.monotonic()
        await client.drain(0.2)
        assert 0.1 < time.monotonic() - started < 5.0
        assert not running.done()
        await client.close()
        assert (await running)[-1] == Failed("a", "the server is stopping", "stopping")

    async def test_while_it_loads_there_is_nothing_to_finish(self, engine):
        client = await engine({"load_seconds": 30}, ready=False)
        await asyncio.wait_for(client.drain(20.0), 10)
        assert client.pid is None

    async def test_an_engine_that_dies_meanwhile_is_not_replaced(self, engine):
        client = await engine(SLOW)
        running = await begin(client, ask(max_tokens=20_000))
        draining = asyncio.create_task(client.drain(20.0))
        await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGKILL)
        await asyncio.wait_for(draining, 10)
        assert (await running)[-1] == Failed("a", "the server is stopping", "stopping")
        assert client.restarts == 0

    async def test_sigterm_to_the_engine_drains_it_too(self, engine):
        client = await engine(SLOW)
        running = await begin(client, ask(max_tokens=100))
        os.kill(client.pid, signal.SIGTERM)
        assert (await running)[-1].finish == "length"
        await asyncio.wait_for(client.wait_for("restarting"), 10)
        await comes_back(client)  # nobody asked this server to stop


async def test_closing_ends_the_engine_and_its_requests(engine):
    client = await engine(SLOW)
    running, pid, directory = await begin(client, ask(max_tokens=20_000)), client.pid, client._directory
    assert directory.stat().st_mode & 0o777 == 0o700
    await client.close()
    assert gone(pid)
    assert isinstance((await running)[-1], Failed)
    assert not directory.exists()
    await client.close()


PARENT = """
import asyncio, sys
from megakernel_runtime.interface import RuntimeSpec
from server.engine.client import EngineClient
from server.scheduling.settings import SchedulerSettings

async def main():
    client = EngineClient(RuntimeSpec("fake", "", fake_script=sys.argv[1]), SchedulerSettings())
    await client.start()
    if "wait" in sys.argv:
        await client.wait_for("ready")
    while client.pid is None:
        await asyncio.sleep(0.01)
    print(client.pid, client._directory, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_it_does_not_outlive_its_parent():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps({}), "wait"], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid, directory = parent.stdout.readline().split()
        assert not gone(int(pid))
        parent.kill()
    asyncio.run(wait_until(lambda: gone(int(pid))))
    for left in Path(directory).iterdir():
        left.unlink()
    Path(directory).rmdir()


def test_an_engine_whose_parent_is_gone_already_does_not_start(tmp_path):
    command = [sys.executable, "-m", "server.engine.main", "--socket", str(tmp_path / "s"), "--parent", "1"]
    spec = '{"runtime": {"backend": "fake", "model_path": ""}, "scheduler": {}}'
    done = subprocess.run([*command, "--spec", spec], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 70
    assert not (tmp_path / "s").exists()


def test_where_no_kernel_sees_to_it_an_orphan_ends_itself():
    """A child whose parent is not the one that it was told."""
    code = "from server.engine.main import exit_when_orphaned; exit_when_orphaned(1)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 70


async def test_a_process_that_cannot_be_started_is_a_failure(engine, monkeypatch):
    monkeypatch.setattr("server.engine.process.PROGRAM", ("/nowhere/python",))
    client = await engine(ready=False)
    assert await asyncio.wait_for(client.wait_for("ready"), 10) == "failed"
    assert "the engine process cannot be started" in client.failure


async def test_an_engine_of_another_build_is_refused(engine, monkeypatch):
    monkeypatch.setattr("server.engine.supervisor.PROTOCOL_VERSION", 99)
    client = await engine(ready=False)
    assert await asyncio.wait_for(client.wait_for("ready"), 10) == "failed"
    assert client.failure == "the engine speaks protocol 1, this server 99: reinstall"


async def test_an_engine_that_sends_what_cannot_be_read_is_replaced(engine):
    client = await engine()
    client._supervisor._link.data_received(b"\xff" * 8)
    assert await asyncio.wait_for(client.wait_for("restarting"), 10) == "restarting"
    await comes_back(client)
