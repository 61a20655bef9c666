"""What HTTP and scheduling add to a token, and what serving several at once gains.

One greedy stream through `megakernel serve`, and the same prompt and number of tokens on the runtime alone, in turn;
then several streams at once. Server and runtime are processes of their own, each idle while the other is measured.
All on the same processors, this client too. Prints a table, what was aimed for, and one JSON line; with --strict, exit
code 1 where an aim was missed. Flags that are not this script's own go to the server.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from cpu import Aim, default_model

from server.cli.child import ChildServer, child_server

WITHIN_S = 120.0
WORKERS = Path(__file__).with_name("cpu_workers.py")
QUESTION = "Tell me a long story about a lighthouse."
END = b"0\r\n\r\n"  # of a chunked response

AloneMs = Callable[[list[int], int], float]  # prompt, tokens -> milliseconds a token


def body_of(number: int, n_tokens: int) -> dict[str, Any]:
    """Return a request that gives exactly `n_tokens`. Streams of different numbers share no prompt."""
    return {
        "messages": [{"role": "user", "content": f"{number}: {QUESTION}"}],
        "temperature": 0,
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
    }


def post(server: ChildServer, path: str, body: dict[str, Any]) -> Any:
    """Return the JSON answer."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=WITHIN_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.api_key}"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {answer}")
    return answer


def streams(server: ChildServer, n_streams: int, n_tokens: int) -> list[list[float]]:
    """Run streams at once; return when each one's tokens came, by this process's clock in seconds.

    A client as light as can be: bytes are timed as they come and looked into afterwards.
    """
    address = urlsplit(server.url)
    assert address.hostname is not None
    assert address.port is not None
    selector = selectors.DefaultSelector()
    came: list[list[tuple[float, bytes]]] = []
    for number in range(n_streams):
        body = json.dumps(body_of(number, n_tokens)).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {server.api_key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        sock = socket.create_connection((address.hostname, address.port))
        sock.sendall(head.encode() + body)
        came.append([])
        selector.register(sock, selectors.EVENT_READ, came[-1])
    while selector.get_map():
        ready = selector.select(WITHIN_S)
        if not ready:
            raise RuntimeError(f"no token came for {WITHIN_S:g} s")
        for key, _ in ready:
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(65536)
            key.data.append((time.perf_counter(), data))
            if not data or data.endswith(END):
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return [_token_times(pieces, n_tokens) for pieces in came]


def _token_times(pieces: list[tuple[float, bytes]], n_tokens: int) -> list[float]:
    times = [at for at, data in pieces for _ in range(data.count(b'"delta":{"content":'))]
    if len(times) < n_tokens // 2:  # a few tokens have no text of their own
        raise RuntimeError(f"{len(times)} tokens came, not {n_tokens}: {b''.join(data for _, data in pieces)[-500:]!r}")
    return times


def rate(times: list[list[float]]) -> float:
    """Return tokens per second of all streams, from the last one's first token to the first one's last."""
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    return sum(begin < at <= end for one in times for at in one) / (end - begin)


@contextmanager
def runtime_alone(model: Path, threads: int) -> Generator[AloneMs]:
    """Yield what measures the runtime without a server: prompt, tokens -> milliseconds a token."""
    command = [sys.executable, str(WORKERS), "on_request", json.dumps({"model": str(model), "threads": threads})]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        asking, answering = worker.stdin, worker.stdout
        json.loads(answering.readline())  # loaded

        def measure(prompt: list[int], tokens: int) -> float:
            print(json.dumps({"prompt": prompt, "tokens": tokens}), file=asking, flush=True)
            return float(json.loads(answering.readline())["step_ms"])

        yield measure
        asking.close()


def measure(options: argparse.Namespace, server: ChildServer, alone_ms: AloneMs) -> dict[str, list[float]]:
    """Return what each round gave."""
    prompt = post(server, "/tokenize", {"messages": body_of(0, 1)["messages"]})["tokens"]
    streams(server, options.streams, 16)  # warms caches of all kinds
    alone_ms(prompt, 16)
    rounds: dict[str, list[float]] = {"runtime_ms": [], "http_ms": [], "one_per_s": [], "together_per_s": []}
    for _ in range(options.repeats):
        rounds["runtime_ms"].append(alone_ms(prompt, options.tokens))
        (one,) = streams(server, 1, options.tokens)
        rounds["http_ms"].append(1e3 * median(b - a for a, b in pairwise(one)))
        rounds["one_per_s"].append(rate([one]))
        rounds["together_per_s"].append(rate(streams(server, options.streams, options.tokens)))
    return rounds


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=default_model(), help="a .gguf file or Hugging Face directory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96, help="generated by each stream")
    parser.add_argument("--streams", type=int, default=8, help="at once")
    parser.add_argument("--repeats", type=int, default=5, help="the best of each is reported")
    parser.add_argument("--strict", action="store_true", help="exit code 1 where an aim was missed")
    options, passed_on = parser.parse_known_args()
    arguments = ("--model", str(options.model), "--backend", "cpu", "--threads", str(options.threads), *passed_on)
    with (
        child_server(arguments, lambda phase: print(f"{phase} ...", file=sys.stderr)) as server,
        runtime_alone(options.model, options.threads) as alone_ms,
    ):
        rounds = measure(options, server, alone_ms)
    runtime_ms, http_ms = min(rounds["runtime_ms"]), min(rounds["http_ms"])
    one, together = max(rounds["one_per_s"]), max(rounds["together_per_s"])
    aims = [
        Aim("HTTP and scheduling, one stream (ms a token)", http_ms - runtime_ms, 2.0, at_most=True),
        Aim(f"{options.streams} streams against one (times the tokens/s)", together / one, 5.0),
    ]
    print(f"{'one sequence, the runtime alone':36} {runtime_ms:>8.2f} ms/token")
    print(f"{'one stream, as its client sees it':36} {http_ms:>8.2f} ms/token {one:>8.1f} tokens/s")
    print(f"{f'{options.streams} streams at once':36} {'':>17} {together:>8.1f} tokens/s\n")
    for aim in aims:
        verdict = "met" if aim.met else "missed"
        print(f"{aim.name}: {aim.measured:.2f}, aim {'<=' if aim.at_most else '>='} {aim.bound:g}: {verdict}")
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    told = [{"name": aim.name, "measured": aim.measured, "bound": aim.bound, "met": aim.met} for aim in aims]
    setting = {"threads": options.threads, "tokens": options.tokens, "streams": options.streams}
    row = {"benchmark": "http_overhead", "rounds": rounds, "aims": told, "machine": machine}
    print("\n" + json.dumps({**row, **setting, "model": options.model.name, "arguments": passed_on}))
    return 1 if options.strict and not all(aim.met for aim in aims) else 0


if __name__ == "__main__":
    sys.exit(main())
