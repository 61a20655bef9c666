"""One generation against a scripted engine: what piles up is merged, failures come after what came before them."""

import asyncio

import pytest

from server.api.chunks import ChatChunks, ChunkShape
from server.api.generation import Disconnected, Generation
from server.api.job import Job
from server.api.sending import EventStream
from server.engine.messages import Cancel, Failed, Rejected, Submit, TokenLogprobs, Tokens, WireSampling
from server.errors import DeadlineExceeded, EngineFault, InvalidRequest, NotReady, Overloaded
from server.telemetry.metrics import Metrics
from server.text.tokenizer import load_tokenizer
from tests.api.harness import END, ids, parse_events, texts

PROMPT = tuple(ids("hi"))


class Engine:
    """Replies with what it is told, request by request; remembers what was cancelled."""

    def __init__(self):
        self.replies = {}
        self.cancelled = []
        self.closed = []

    async def submit(self, request):
        queue = self.replies.setdefault(request.request_id, asyncio.Queue())
        try:
            while (reply := await queue.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            self.closed.append(request.request_id)

    def cancel(self, cancel):
        self.cancelled.append(cancel)

    def say(self, *replies, request="r0"):
        for reply in replies:
            self.replies.setdefault(request, asyncio.Queue()).put_nowait(reply)


def tokens(text, choice=0, *, request="r0", **more):
    return Tokens(request, choice, tuple(ids(text)), **more)


@pytest.fixture
def make(tiny_path):
    """make(n, prompts, stops): (engine, generation)."""
    tokenizer = load_tokenizer(tiny_path)

    def build(*, n=1, prompts=1, stops=()):
        engine = Engine()
        sampling = WireSampling(stop_token_ids=(END,), max_tokens=100)
        job = Job(
            id="x",
            submits=tuple(Submit(f"r{i}", PROMPT, sampling, n) for i in range(prompts)),
            prefixes=("",) * prompts,
            n=n,
            tokenizer=tokenizer,
            stops=stops,
            include_stop=False,
            skip_special=True,
            continues=False,
            min_tokens=0,
        )
        metrics = Metrics("m")
        return engine, Generation(job, engine, metrics, 0.0), metrics

    return build


async def settle():
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def read(generation):
    await generation.admitted()
    return await generation.deltas()


def value(metrics, line):
    """The value of a series on the page, by the beginning of its line."""
    found = [row for row in metrics.render().decode().splitlines() if row.startswith(line)]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


async def test_what_piles_up_comes_at_once_for_each_choice(make):
    engine, generation, _ = make(n=2)
    async with generation:
        engine.say(tokens("ab"), tokens("x", 1), tokens("cd"), tokens("y", 1), tokens("e", finish="length"))
        await settle()
        first, second = await generation.deltas()
        assert (first.index, first.text, first.finish, first.token_ids) == (0, "abcde", "length", tuple(ids("abcde")))
        assert (second.index, second.text, second.finish) == (1, "xy", None)
        engine.say(tokens("z", 1, finish="length"))
        (last,) = await generation.deltas()
        assert (last.text, last.first, last.finish) == ("z", False, "length")
        assert await generation.deltas() is None


async def test_a_slow_reader_gets_one_large_chunk(make):
    engine, generation, metrics = make()
    shape = ChunkShape("x", 1, "m", False, False, (PROMPT,), False)
    stream = EventStream(ChatChunks(shape), metrics, keep_alive_s=10, usage=False, continuous=False)
    may_send, sent = asyncio.Event(), []

    async def send(message):
        sent.append(message)
        if len(sent) == 2:  # the first chunk: the client takes no more for a while
            await may_send.wait()

    async with generation:
        engine.say(tokens("a"))
        sending = asyncio.create_task(stream.send(generation, send))
        await settle()
        assert len(sent) == 2
        for _ in range(1000):
            engine.say(tokens("bc"))
        await settle()
        engine.say(tokens("d", finish="length"))
        await settle()
        may_send.set()
        await sending
    assert len(sent) == 4  # head, first chunk, all the rest, [DONE]
    body = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    assert texts(parse_events(body)) == {0: "a" + "bc" * 1000 + "d"}
    assert [message.get("more_body", False) for message in sent[1:]] == [True, True, False]


async def test_a_stop_string_cancels_its_choice_only(make):
    engine, generation, _ = make(n=2, stops=("!",))
    async with generation:
        engine.say(tokens("a!b"), tokens("x", 1))
        await settle()
        first, second = await generation.deltas()
        assert (first.text, first.finish, second.finish) == ("a", "stop", None)
        assert engine.cancelled == [Cancel("r0", 0)]
        engine.say(Tokens("r0", 0, (), finish="cancelled"), tokens("c"), tokens("y", 1, finish="length"))
        await settle()
        (delta,) = await generation.deltas()
        assert (delta.index, delta.text) == (1, "y")
        assert await generation.deltas() is None
    assert generation.completion_tokens == 4


async def test_leaving_ends_every_prompt_s_request(make):
    engine, generation, metrics = make(prompts=3)
    async with generation:
        engine.say(tokens("a"))
        await settle()
        assert await generation.deltas()
    await settle()
    assert sorted(engine.closed) == ["r0", "r1", "r2"]
    assert value(metrics, 'vllm:request_success_total{engine="0",finished_reason="abort"') == 3
    assert value(metrics, "vllm:request_generation_tokens_sum") == 1


async def test_what_came_before_a_failure_is_told_before_it(make):
    engine, generation, metrics = make()
    async with generation:
        engine.say(tokens("ab"), tokens("c"), Failed("r0", "the engine was lost"))
        await settle()
        (delta,) = await generation.deltas()
        assert delta.text == "abc"
        with pytest.raises(EngineFault, match="the engine was lost"):
            await generation.deltas()
    assert value(metrics, 'vllm:request_success_total{engine="0",finished_reason="error"') == 1


@pytest.mark.parametrize(
    ("reply", "kind", "code", "retry"),
    [
        (Rejected("r0", "queue_full", "full", 3.0), Overloaded, "queue_full", 3.0),
        (Rejected("r0", "deadline", "late", 1.0), Overloaded, "deadline", 1.0),
        (Rejected("r0", "not_ready", "soon", 2.0), NotReady, "not_ready", 2.0),
        (Rejected("r0", "draining", "bye", 2.0), NotReady, "draining", 2.0),
        (Rejected("r0", "too_long", "long"), InvalidRequest, "context_length_exceeded", None),
        (Failed("r0", "gone"), EngineFault, "engine_fault", None),
        (Failed("r0", "late", "deadline"), DeadlineExceeded, "deadline_exceeded", None),
        (Failed("r0", "bye", "stopping"), NotReady, "draining", 5.0),
        (Tokens("r0", 0, (), finish="error"), EngineFault, "engine_fault", None),
    ],
)
async def test_refusals_and_failures_as_clients_are_told(make, reply, kind, code, retry):
    engine, generation, metrics = make()
    async with generation:
        engine.say(reply)
        with pytest.raises(kind) as caught:
            await read(generation)
    assert (caught.value.code, caught.value.retry_after_s) == (code, retry)
    refused = isinstance(reply, Rejected)
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == (not refused)
    if refused:
        line = f'megakernel_admission_rejections_total{{reason="{reply.reason}"}}'
        assert value(metrics, line) == 1


async def test_a_refused_prompt_is_told_before_another_one_s_tokens(make):
    engine, generation, _ = make(prompts=2)
    async with generation:
        engine.say(tokens("a"))
        engine.say(Rejected("r1", "queue_full", "full"), request="r1")
        await settle()
        with pytest.raises(Overloaded):
            await generation.admitted()


async def test_an_exception_of_the_engine_s_client_reaches_the_reader(make):
    engine, generation, _ = make()
    async with generation:
        engine.say(ValueError("in use"))
        with pytest.raises(ValueError, match="in use"):
            await generation.admitted()


async def test_abandoned_while_waiting_and_while_reading(make):
    for reads in ("admitted", "deltas"):
        engine, generation, _ = make()
        async with generation:
            reading = asyncio.create_task(getattr(generation, reads)())
            await settle()
            generation.abandon()
            with pytest.raises(Disconnected):
                await reading
            await settle()
            assert engine.closed == ["r0"]


async def test_a_woken_reader_gets_nothing(make):
    _, generation, _ = make()
    async with generation:
        reading = asyncio.create_task(generation.deltas())
        await settle()
        generation.wake()
        assert await reading == []


async def test_cached_tokens_count_once_for_each_prompt(make):
    engine, generation, _ = make(n=2, prompts=2)
    async with generation:
        for i in (0, 1):
            engine.say(
                tokens("a", 0, request=f"r{i}", cached_prompt_tokens=16),
                tokens("a", 1, request=f"r{i}", cached_prompt_tokens=32),  # choice 0 computed these a moment ago
                request=f"r{i}",
            )
        await settle()
        await generation.deltas()
        assert generation.cached_tokens == 32


async def test_times_are_told_to_the_metrics(make):
    engine, generation, metrics = make()
    async with generation:
        engine.say(tokens("a"))
        await settle()
        await generation.deltas()
        engine.say(tokens("bcd", logprobs=(TokenLogprobs(-1.0),) * 3, finish="length"))
        await settle()
        (delta,) = await generation.deltas()
    assert [token.logprob for token in delta.tokens] == [-1.0] * 3
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 3
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 2
    assert value(metrics, 'vllm:request_success_total{engine="0",finished_reason="length"') == 1
