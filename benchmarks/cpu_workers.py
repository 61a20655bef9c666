"""One measurement of benchmarks/cpu.py in a process of its own: `cpu_workers.py NAME ARGUMENTS-AS-JSON` prints JSON.

Every worker decodes greedily from the same token ids on the same number of threads, and times decoding alone: the time
between the first token and the last, over the tokens between them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

PROMPT_TOKENS = 32
FIRST_ID = 1000  # prompts are runs of ids from here on, a different one for each sequence


def prompt(sequence: int, length: int = PROMPT_TOKENS) -> list[int]:
    """Return the prompt of one sequence."""
    return list(range(FIRST_ID + sequence, FIRST_ID + sequence + length))


def megakernel(model: str, threads: int, tokens: int, repeats: int, weight_format: str) -> dict[str, float]:
    """Measure the cpu backend: batch 1 and 8, prefill of 512 tokens, memory."""
    from megakernel_runtime.factory import load_runtime
    from megakernel_runtime.interface import RuntimeSpec

    began = time.perf_counter()
    spec = RuntimeSpec("cpu", model, threads=threads, weight_format=weight_format)
    runtime = load_runtime(spec, _ignore_progress)
    load_s = time.perf_counter() - began
    bench = _Decoder(runtime)
    rounds = [(bench.decode_ms(1, tokens), bench.decode_ms(8, tokens), bench.prefill_s(512)) for _ in range(repeats)]
    return {
        "load_s": load_s,
        "step_ms_1": min(one for one, _, _ in rounds),
        "step_ms_8": min(eight for _, eight, _ in rounds),
        "prefill_tokens_per_s": 512 / min(prefill for _, _, prefill in rounds),
        "resident_mib": _resident_mib(),
    }


def _ignore_progress(phase: str, done: int, total: int) -> None:
    """Nobody watches."""
    del phase, done, total


class _Decoder:
    """Drives a runtime as the engine does, one plan a step."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._plan_id = 0

    def decode_ms(self, n: int, tokens: int, ids: list[int] | None = None) -> float:
        """Return the median time of a step that decodes `n` sequences. `ids`: the prompt, if not the usual one."""
        self._start(n, PROMPT_TOKENS if ids is None else len(ids), tokens + 1, ids)
        slots = tuple(range(n))
        times: list[float] = []
        for _ in range(tokens):
            began = time.perf_counter()
            self._run(decode=slots)
            times.append(time.perf_counter() - began)
        self._run(releases=slots)
        return median(times) * 1e3

    def prefill_s(self, length: int) -> float:
        """Return how long a prompt takes until its first token."""
        began = time.perf_counter()
        self._start(1, length, 1)
        took = time.perf_counter() - began
        self._run(releases=(0,))
        return took

    def _start(self, n: int, length: int, tokens: int, given: list[int] | None = None) -> None:
        """Admit `n` sequences with pages that alternate, as they do when sequences grow side by side; prefill them."""
        from megakernel_runtime.interface import PrefillRow, SamplingParams, SlotAdmit

        c = self._runtime.capacity
        n_pages = -(-(length + tokens) // c.page_size_tokens)
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        for slot in range(n):
            pages = tuple(slot + n * i for i in range(n_pages))
            ids = tuple(given or prompt(slot, length))
            self._run(admits=(SlotAdmit(slot, ids, length, sampling, pages=pages),))
            for start in range(0, length, c.max_step_tokens):
                self._run(prefill=(PrefillRow(slot, start, min(c.max_step_tokens, length - start)),))

    def _run(self, **plan: Any) -> None:
        from megakernel_runtime.interface import StepPlan

        self._plan_id += 1
        self._runtime.submit(StepPlan(self._plan_id, **plan))
        while not any(result.last for result in self._runtime.poll(1.0)):
            pass


def on_request(model: str, threads: int) -> NoReturn:
    """Measure the cpu backend each time that a line {"prompt": ids, "tokens": n} comes in; end with the input."""
    from megakernel_runtime.factory import load_runtime
    from megakernel_runtime.interface import RuntimeSpec

    bench = _Decoder(load_runtime(RuntimeSpec("cpu", model, threads=threads), _ignore_progress))
    print("{}", flush=True)  # loaded
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"step_ms": bench.decode_ms(1, asked["tokens"], asked["prompt"])}), flush=True)
    sys.exit()  # nobody listens any more


def hugging_face(model: str, threads: int, tokens: int, repeats: int) -> dict[str, float]:
    """Measure `generate` of transformers in bf16, batch 1."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    torch.set_num_threads(threads)
    path = Path(model)
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        gguf = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        where = {"pretrained_model_name_or_path": path.parent, **gguf}
    loaded: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16).eval()
    ids = torch.tensor([prompt(0)])
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}

    def generate(n: int) -> None:
        with torch.inference_mode():
            loaded.generate(ids, max_new_tokens=n, **options)

    return {"step_ms_1": _per_token_ms(generate, tokens, repeats), "resident_mib": _resident_mib()}


def llama_cpp(model: str, threads: int, tokens: int, repeats: int) -> dict[str, float]:
    """Measure llama.cpp on the same file, batch 1."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    loaded: Any = llama_cpp.Llama(model, n_threads=threads, n_threads_batch=threads, n_ctx=1024, verbose=False)

    def generate(n: int) -> None:
        stream = loaded.generate(prompt(0), temp=0.0, reset=True)
        for _ in range(n):
            next(stream)

    return {"step_ms_1": _per_token_ms(generate, tokens, repeats), "resident_mib": _resident_mib()}


def _per_token_ms(generate: Callable[[int], None], tokens: int, repeats: int) -> float:
    """Return the time of a token after the first, the best of `repeats`."""
    generate(2)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        generate(1)
        first = time.perf_counter()
        generate(tokens + 1)
        best = min(best, (time.perf_counter() - first - (first - began)) / tokens)
    return best * 1e3


def _resident_mib() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


if __name__ == "__main__":
    workers: dict[str, Callable[..., dict[str, float]]] = {
        "megakernel": megakernel,
        "on_request": on_request,
        "hugging_face": hugging_face,
        "llama_cpp": llama_cpp,
    }
    print(json.dumps(workers[sys.argv[1]](**json.loads(sys.argv[2]))))
