"""The only contract between `server` and `megakernel_runtime`. Standard library only.

A runtime owns `max_slots` *slots*. A slot is the device-side state of one sequence: its tokens, its page table,
its position, its sampling parameters and its random stream. The scheduler decides which slots run; the runtime
runs them. It must not know: requests, users, text, HTTP, or why the scheduler decided what it did.

Semantics of plans:
- Plans take effect at a step boundary, in the order in which they were submitted.
- A plan's admissions, page grants and releases are applied once, before its first step.
- Its *prefill* rows run once, in its first step. Its *decode* rows run in each of its up to `lease_steps` steps; the
  token sampled in one step is the input of the next, without the host.
- A plan runs at least one step. Once a later plan is queued, the remaining lease of the earlier one is given up at
  the next step boundary. A lease also ends where a decoding slot has no page for its next token, or all are finished.
- The last result of every plan says so. A plan that gives up its lease between steps gives one more result, without
  rows, for that.
- A slot that samples one of its `stop_token_ids`, or reaches `max_tokens` generated tokens or `max_model_len_tokens`
  tokens in all, is *finished*: the runtime reports it once and skips the slot's rows from then on, also in plans that
  still name it.
- A plan that breaks these rules is a RuntimeFault, from `submit` or when its turn comes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

MAX_TOP_LOGPROBS = 20


class RuntimeFault(Exception):
    """The device or backend failed and its slots are lost; the engine must rebuild the runtime."""


class ModelError(Exception):
    """The model's files cannot be served: unsupported, incomplete or damaged. Loading again will not help; the message
    names the file and the key or tensor.
    """


class CapacityError(Exception):
    """The model does not fit the machine; the message names what was needed and what there is."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended. The runtime itself reports only `STOP` and `LENGTH`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of one sequence is chosen. All fields are applied in the order in which they stand.

    The random stream is counter-based: Philox keyed by `seed`, counted by the index of the generated token, so that
    the same (seed, logits) give the same token in any batch and on any run.
    """

    repetition_penalty: float = 1.0  # over prompt and output; 1 = off
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit); ids inside the vocabulary
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    seed: int = 0  # unsigned 64 bit
    top_logprobs: int | None = None  # None: none; 0: the chosen token only; else the n best too, n <= MAX_TOP_LOGPROBS
    min_tokens: int = 0  # until so many were generated, `stop_token_ids` are masked out
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless the request ignores them
    max_tokens: int = 1  # generated tokens, >= 1

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class SlotAdmit:
    """Puts a sequence into a free slot. `tokens` is all that is known of it: prompt, and output so far on recompute."""

    slot: int
    tokens: tuple[int, ...]
    prompt_len: int  # tokens[:prompt_len] is the user's prompt; the rest was generated before a preemption
    sampling: SamplingParams
    cached_len: int = 0  # tokens whose KV already lies in `pages`: a multiple of the page size, < len(tokens)
    pages: tuple[int, ...] = ()  # page table so far, in order


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Appends pages to a slot's page table."""

    slot: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Computes tokens[start : start + count] of a slot. If that reaches the end of its tokens, one token is sampled."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to run next. A slot appears in at most one of `prefill` and `decode`."""

    plan_id: int  # increases by one from 1
    releases: tuple[int, ...] = ()  # slots freed before anything else; their pages may be in later grants
    admits: tuple[SlotAdmit, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    decode: tuple[int, ...] = ()  # slots
    lease_steps: int = 1


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One generated token. `top` is sorted by falling logprob and is empty unless asked for."""

    slot: int
    token: int
    logprob: float | None = None  # natural log, of the distribution after penalties and bias at temperature 1
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. Every plan gives at least one, the results come in order."""

    plan_id: int
    step_index: int  # 0 .. lease_steps - 1 within the plan
    last: bool  # the plan gives no further result
    tokens: tuple[SampledToken, ...]
    n_rows: int  # tokens computed in this step
    started_ns: int  # device clock, brought onto the host's time.monotonic_ns scale
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a loaded runtime can hold. Fixed while it lives."""

    max_slots: int
    n_pages: int
    page_size_tokens: int
    max_model_len_tokens: int
    max_step_tokens: int  # prefill and decode rows together in one step
    max_lease_steps: int  # 1: the host plans every step
    max_plans_ahead: int  # plans that may be submitted and unfinished at once
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Cumulative since load, never falling. The gpu_* states, averaged over SMs, sum to the wall time since load."""

    compute_ns: int = 0
    wait_dependency_ns: int = 0
    wait_memory_ns: int = 0
    wait_host_ns: int = 0
    parked_ns: int = 0
    launches: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])  # (variant, reason)
    # (bucket of rows, decode | prefill | mixed)
    steps: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    wait_timeouts: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict[str, int])  # reason
    resident: bool = False
    kernels_avoided: int = 0
    bytes_streamed: int = 0  # weights and KV read
    bandwidth_ceiling_bytes_per_s: float = 0.0  # measured; 0 = not measured


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Names for logs, metrics and `megakernel check`."""

    backend: str  # megakernel | graphs | eager | cpu | fake
    device: str  # e.g. "NVIDIA H200, 132 SMs" or "CPU, 2 threads"
    model: str  # architecture and size, e.g. "LlamaForCausalLM 135M"
    weight_bytes: int
    kv_bytes: int


@runtime_checkable
class Runtime(Protocol):
    """A loaded model on a device. Used by one thread. Not reentrant."""

    @property
    def capacity(self) -> Capacity:
        """Sizes, constant while the runtime lives."""
        ...

    @property
    def info(self) -> DeviceInfo:
        """Names, constant while the runtime lives."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan and return at once. At most `capacity.max_plans_ahead` may be unfinished."""
        ...

    def poll(self, timeout_s: float) -> Sequence[StepResult]:
        """Return results not yet returned, oldest first; wait up to `timeout_s` for the first. Backends without a
        device of their own do the work of one step in here. Raises RuntimeFault.
        """
        ...

    def telemetry(self) -> Telemetry:
        """Counters now. Cheap enough for ten calls a second."""
        ...

    def close(self) -> None:
        """Release device and memory. Idempotent; never raises."""
        ...


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """What the engine asks `factory.load_runtime` for. Zero means: choose from what the machine has."""

    backend: str  # auto | megakernel | graphs | eager | cpu | fake
    model_path: str  # a Hugging Face directory or a .gguf file; ignored by "fake"
    max_slots: int = 0
    max_model_len_tokens: int = 0
    max_step_tokens: int = 0
    page_size_tokens: int = 0
    n_pages: int = 0
    kv_memory_bytes: int = 0  # used when n_pages is 0
    threads: int = 0  # cpu backend
    weight_format: str = "auto"  # cpu: auto | fp32 | fp16 | bf16 | int8 | int4; graphs and eager: auto | bf16 | fp32
    sm_reserve: int = 0  # SMs left to others, megakernel
    idle_park_ms: int = 2000  # megakernel
    random_weights: bool = False  # benchmark: config.json alone is enough, weights are drawn from a fixed seed
    fake_script: str = ""  # JSON, fake backend only: see backends/fake.py


class Progress(Protocol):
    """Told of load progress; total 0 means unknown."""

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Take note."""
        ...
