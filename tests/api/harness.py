"""What the API tests share: a tiny tokenizer, a server on a real socket in a thread, and readers of its answers.

The tiny vocabulary is bytes, so that a text's tokens can be told by hand: `ids("a")` is one token, `ids("é")` two.
"""

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager

import httpx
import openai
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from megakernel_runtime.interface import RuntimeSpec
from server.api.connection import server_config
from server.app import build_app
from server.engine.supervisor import Supervision
from server.plan import ServePlan
from server.scheduling.settings import SchedulerSettings
from server.text.vocabulary import CODE_POINT_OF_BYTE

WITHIN_S = 120.0
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2  # <|im_end|>
FIRST_BYTE = 3
VOCAB_SIZE = 259
MODEL = "tiny"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if hint is defined %}{{ hint }}{% endif %}"
)


def ids(text):
    """The tokens of a text without control tokens."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def text_script(text, **more):
    """A script that answers `text`, then ends."""
    return {"emit": "text", "ids": ids(text), "end_id": END, "vocab_size": VOCAB_SIZE} | more


def write_tiny_model(path, *, bos=False):
    """Write the tokenizer and its small files as a Hugging Face directory; there are no weights. `bos`: a text's
    prompt begins with <|endoftext|>.
    """
    vocab = {text: number for number, text in enumerate(SPECIAL)}
    vocab |= {chr(CODE_POINT_OF_BYTE[byte]): FIRST_BYTE + byte for byte in range(256)}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.save(str(path / "tokenizer.json"))
    config = {"eos_token": SPECIAL[END]} | ({"bos_token": SPECIAL[0], "add_bos_token": True} if bos else {})
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    (path / "chat_template.jinja").write_text(CHATML)
    return path


class Served:
    """A running server: its addresses, and clients that lead to it."""

    def __init__(self, plan, supervision=None, connection=None):
        self.plan = plan
        self._connection = connection
        self._supervision = supervision
        self._up = Future()
        self._thread = threading.Thread(target=self._run, name="api-server")
        self._thread.start()
        self.app, self.loop, self.server, self.port = self._up.result(WITHIN_S)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=WITHIN_S)
        self._clients = []
        self.openai = self.client()

    def client(self, **changes):
        """A client of OpenAI's; it never asks twice by itself."""
        http = httpx.Client(trust_env=False, timeout=WITHIN_S)
        given = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "http_client": http}
        self._clients.append(openai.OpenAI(**(given | changes)))
        return self._clients[-1]

    @property
    def engine(self):
        return self.app.state.engine

    def call(self, make):
        """Return what the coroutine of `make()` returns, run on the server's loop."""
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(WITHIN_S)

    def wait_for(self, *states):
        async def wait():
            return await asyncio.wait_for(self.engine.wait_for(*states), WITHIN_S)

        assert self.call(wait) in states
        return self

    def post(self, path, body, **more):
        return self.http.post(path, json=body, **more)

    def chat(self, content="hi", **fields):
        """Ask without streaming; the answer, checked to be 200."""
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt="hi", **fields):
        answer = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path, body):
        """Ask with streaming; the events as JSON, the end checked."""
        answer = self.post(path, body | {"stream": True})
        assert answer.status_code == 200, answer.text
        return parse_events(answer.text)

    def chat_events(self, content="hi", **fields):
        return self.events("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def complete_events(self, prompt="hi", **fields):
        return self.events("/v1/completions", {"prompt": prompt, **fields})

    def metric(self, name, **labels):
        """The value of one series; 0 where there is none yet."""
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0

    def until_idle(self):
        """Wait until the engine says that nothing runs and nothing waits."""

        async def wait():
            seen = asyncio.Queue()
            self.engine.on_observations(seen.put_nowait)
            while True:
                gauges = (await asyncio.wait_for(seen.get(), WITHIN_S)).gauges
                if not gauges["vllm:num_requests_running"] and not gauges["vllm:num_requests_waiting"]:
                    return

        self.call(wait)

    def close(self):
        for client in (self.http, *self._clients):
            client.close()
        self.loop.call_soon_threadsafe(setattr, self.server, "should_exit", True)
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()

    def _run(self):
        try:
            app = build_app(self.plan, supervision=self._supervision)
            config = server_config(app, self._connection)
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(self._serve(app, uvicorn.Server(config)))
        except BaseException as error:
            if self._up.done():
                raise
            self._up.set_exception(error)

    async def _serve(self, app, server):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1024)
            self._up.set_result((app, asyncio.get_running_loop(), server, listener.getsockname()[1]))
            await server.serve(sockets=[listener])


def make_plan(model_path, script=None, *, spec=None, scheduler=None, **changes):
    """A plan for the fake runtime; `spec` changes its RuntimeSpec, `scheduler` its settings."""
    fields = {
        "host": "127.0.0.1",
        "port": 0,
        "served_names": (MODEL, "alias"),
        "model_path": model_path,
        "runtime": RuntimeSpec(
            **{"backend": "fake", "model_path": "", "fake_script": json.dumps(script or text_script("ok"))}
            | (spec or {})
        ),
        "scheduler": SchedulerSettings(**(scheduler or {})),
        "log_level": "warning",
    }
    return ServePlan(**(fields | changes))


FAST = Supervision(hang_timeout_s=10.0, first_pause_s=0.05, longest_pause_s=0.2, end_within_s=2.0)


@contextmanager
def serving(plan, supervision=FAST, *, ready=True, connection=None):
    """A server of one test's own. `connection`: its protocol, other than the usual one."""
    served = Served(plan, supervision, connection)
    try:
        yield served.wait_for("ready") if ready else served
    finally:
        served.close()


def parse_events(text):
    """The events of a whole stream, which must be separated as they should and end with [DONE]."""
    assert text.endswith("data: [DONE]\n\n")
    blocks = [block for block in text.split("\n\n")[:-2] if not block.startswith(":")]
    assert all(re.fullmatch(r"data: \{.*\}", block) for block in blocks), text
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def texts(events):
    """Choice -> its text, from the chunks of a chat or of a text completion."""
    out = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            out[choice["index"]] = out.get(choice["index"], "") + piece
    return out


def finishes(events):
    """Choice -> its finish reasons, in order."""
    out = {}
    for event in events:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                out.setdefault(choice["index"], []).append(choice["finish_reason"])
    return out


def expect_error(answer, status, *, param=None, code=None):
    """The error's message; status, shape, param and code are checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    assert error["type"].endswith("_error")
    assert answer.headers["x-request-id"]
    return error["message"]


def eventually(condition, within_s=WITHIN_S):
    """Wait until `condition()` holds: for what only polling from outside can see."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.01)
