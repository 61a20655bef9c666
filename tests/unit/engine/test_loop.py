"""The loop in this process, turn by turn, with the fake runtime and real sockets."""

import json
import socket
import time

import pytest

from megakernel_runtime.factory import load_runtime
from megakernel_runtime.interface import RuntimeFault, RuntimeSpec
from server.engine.listener import Listener
from server.engine.loop import EngineLoop
from server.engine.messages import Cancel, Drain, Failed, Fault, Observations, Rejected, Submit, Tokens, WireSampling
from server.engine.wire import api_reader, encode
from server.scheduling.settings import SchedulerSettings

HELD_BACK_S = 5.0


class Bench:
    """A loop and its connections. `until` turns the loop until a connection has what is wanted."""

    def __init__(self, path, *, scheduler=None, stall_timeout_s=10.0, max_slots=4, script=None, **spec):
        runtime = load_runtime(
            RuntimeSpec("fake", "", max_slots=max_slots, fake_script=json.dumps(script or {}), **spec), lambda *_: None
        )
        self.path, self.listener = path, Listener(path)
        self.loop = EngineLoop(
            runtime, self.listener, scheduler or SchedulerSettings(), stall_timeout_s=stall_timeout_s
        )
        self.ends = []

    def connect(self):
        end = End(self)
        self.ends.append(end)
        return end

    def turn(self):
        self.loop._turn()

    def close(self):
        for end in self.ends:
            end.socket.close()
        self.listener.close(0.1)


class End:
    def __init__(self, bench):
        self.bench, self.reader, self.got = bench, api_reader(), []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(bench.path))
        self.socket.setblocking(False)

    def send(self, *messages):
        out = bytearray()
        for message in messages:
            encode(message, out)
        while out:
            try:
                del out[: self.socket.send(out)]
            except BlockingIOError:  # full: let the engine take some
                self.bench.turn()
                self.read()

    def read(self):
        try:
            self.got += self.reader.feed(self.socket.recv(1_000_000))
        except BlockingIOError:
            return

    def until(self, wanted):
        deadline, looked = time.monotonic() + HELD_BACK_S, 0
        while (found := next(filter(wanted, self.got[looked:]), None)) is None:
            assert time.monotonic() < deadline, self.got
            looked = len(self.got)
            self.bench.turn()
            self.read()
        return found

    def answer(self, request_id, choice=0):
        """All tokens of one choice, once it has finished."""
        self.until(lambda m: isinstance(m, Tokens) and (m.request_id, m.choice) == (request_id, choice) and m.finish)
        return [t for m in self.got if isinstance(m, Tokens) and (m.request_id, m.choice) == (request_id, choice)
                for t in m.tokens]  # fmt: skip


@pytest.fixture
def bench(tmp_path):
    benches = []

    def make(**more):
        benches.append(Bench(tmp_path / f"engine{len(benches)}", **more))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def ask(request_id="a", prompt=(1, 2, 3), n=1, priority=0, deadline_s=0.0, **sampling):
    return Submit(request_id, prompt, WireSampling(**({"max_tokens": 4} | sampling)), n, priority, "", deadline_s)


ECHO = {"emit": "echo"}


def test_tokens_come_back_with_all_that_belongs_to_them(bench):
    end = bench(script=ECHO).connect()
    end.send(ask(top_logprobs=2, max_tokens=2))
    assert end.answer("a") == [1, 2]
    first, last = [m for m in end.got if isinstance(m, Tokens)]
    assert first.logprobs[0].top[0][0] == 1
    assert first.logprobs[0].logprob == first.logprobs[0].top[0][1] > first.logprobs[0].top[1][1]
    assert (first.finish, last.finish) == (None, "length")
    assert 0 < first.device_ns <= last.device_ns <= time.monotonic_ns()


def test_stop_ids_choices_and_cached_tokens(bench):
    end = bench(script=ECHO).connect()
    prompt = tuple(range(40))
    end.send(ask("a", prompt, n=2, max_tokens=30, stop_token_ids=(5,)))
    assert end.answer("a", 0) == end.answer("a", 1) == [0, 1, 2, 3, 4, 5]
    cached = {m.choice: m.cached_prompt_tokens for m in reversed(end.got) if isinstance(m, Tokens)}
    assert cached == {0: 0, 1: 32}
    assert end.until(lambda m: isinstance(m, Tokens) and m.choice == 1 and m.finish).finish == "stop"


def test_request_ids_are_each_connections_own(bench):
    one = bench(script=ECHO)
    first, second = one.connect(), one.connect()
    first.send(ask("same", (1, 2)))
    second.send(ask("same", (8, 9)))
    assert first.answer("same") == [1, 2, 1, 2]
    assert second.answer("same") == [8, 9, 8, 9]


def test_a_connection_that_is_lost_takes_its_requests_along(bench):
    one = bench(script=ECHO, max_slots=1)
    gone, stays = one.connect(), one.connect()
    gone.send(ask("a", max_tokens=10_000), ask("b", max_tokens=10_000))
    gone.until(lambda m: isinstance(m, Tokens))
    gone.socket.close()
    stays.send(ask("c"))
    assert stays.answer("c") == [1, 2, 3, 1]
    assert one.loop._scheduler.is_idle


@pytest.mark.parametrize("choice", [None, 1])
def test_cancelled_choices_end_as_cancelled(bench, choice):
    end = bench(script=ECHO).connect()
    end.send(ask(n=2, max_tokens=300))
    end.until(lambda m: isinstance(m, Tokens) and m.choice == 1)
    end.send(Cancel("a", choice))
    ended = end.until(lambda m: isinstance(m, Tokens) and m.choice == 1 and m.finish)
    assert (ended.finish, ended.tokens) == ("cancelled", ())
    other = end.until(lambda m: isinstance(m, Tokens) and m.choice == 0 and m.finish)
    assert other.finish == ("cancelled" if choice is None else "length")


def test_what_cannot_be_taken_is_refused_with_its_reason(bench):
    end = bench(max_slots=1, max_model_len_tokens=100, scheduler=SchedulerSettings(max_queue_requests=1)).connect()
    end.send(ask("long", max_tokens=98), ask("broken", prompt=()), ask("a", max_tokens=50), ask("b"), ask("c"))
    long, full = (end.until(lambda m, i=i: isinstance(m, Rejected) and m.request_id == i) for i in ("long", "c"))
    assert (long.reason, full.reason) == ("too_long", "queue_full")
    assert full.retry_after_s >= 1
    assert "no tokens" in end.until(lambda m: isinstance(m, Failed)).message
    assert len(end.answer("b")) == 4


def test_deadlines(bench):
    end = bench(max_slots=1, script={"step_seconds": 0.01}).connect()
    end.send(ask("runs", max_tokens=10_000, deadline_s=0.2), ask("waits", deadline_s=0.1))
    assert end.until(lambda m: isinstance(m, Rejected)).reason == "deadline"
    assert "time was over" in end.until(lambda m: isinstance(m, Failed)).message


def test_draining_finishes_what_was_accepted_and_takes_no_more(bench):
    one = bench(max_slots=1)
    end = one.connect()
    end.send(ask("a"), ask("b"), Drain(), ask("c"))
    one.loop.run()
    end.read()
    assert {m.request_id: m.finish for m in end.got if isinstance(m, Tokens)} == {"a": "length", "b": "length"}
    assert [(m.request_id, m.reason) for m in end.got if isinstance(m, Rejected)] == [("c", "draining")]


def test_a_fault_is_told_to_everybody_and_ends_the_loop(bench):
    one = bench(max_slots=1, script={"fault_at_step": 3})
    end, other = one.connect(), one.connect()
    end.send(ask("a", max_tokens=10), ask("b"))
    with pytest.raises(RuntimeFault, match="scripted fault in step 3"):
        one.loop.run()
    one.listener.flush()
    end.read()
    other.read()
    assert end.got[-1] == other.got[-1] == Fault("scripted fault in step 3")


def test_a_device_that_ends_no_step_is_a_fault(bench):
    one = bench(stall_timeout_s=0.2, script={"stall_at_step": 2})
    end = one.connect()
    end.send(ask())
    with pytest.raises(RuntimeFault, match=r"no step for 0\.2 s"):
        one.loop.run()
    assert len(end.got) <= 1


def test_a_broken_invariant_is_found_once_work_has_run_out(bench):
    one = bench(max_slots=2)
    end = one.connect()
    end.send(ask())
    end.answer("a")
    one.loop._scheduler._state.free_slots.clear()
    with pytest.raises(AssertionError, match="slots are not all accounted for"):
        one.loop.run()


def test_observations_reach_every_connection(bench):
    one = bench(script=ECHO)
    first, second = one.connect(), one.connect()
    first.send(ask("a"))
    first.answer("a")
    for end in (first, second):
        seen = end.until(lambda m: isinstance(m, Observations) and m.counters["vllm:generation_tokens_total"] == 4)
        assert seen.samples["vllm:iteration_tokens_total"] == [3.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("script", [ECHO, {"emit": "echo", "max_lease_steps": 16, "max_plans_ahead": 2}])
def test_a_thousand_requests_leave_nothing_behind(bench, script):
    one = bench(script=script, max_slots=16, n_pages=60, max_model_len_tokens=200,
                scheduler=SchedulerSettings(max_queue_requests=2000))  # fmt: skip
    end = one.connect()
    end.send(*(ask(str(i), tuple(range(i % 50 + 1)), n=1 + i % 2, max_tokens=1 + i % 23) for i in range(1000)))
    for i in range(0, 1000, 7):
        end.send(Cancel(str(i)))
    for i in range(1000):
        if i % 7:
            expected = [t % (i % 50 + 1) for t in range(1 + i % 23)]
            assert end.answer(str(i)) == expected
    one.turn()
    one.loop._scheduler.check_integrity()
    assert one.loop._scheduler.is_idle
    assert one.loop._scheduler.gauges.kv_usage == 0
