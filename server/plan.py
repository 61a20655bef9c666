"""The resolved plan of one server process: what `settings.resolve` decided and everything below obeys, frozen.

Must not know: where a value came from (flag, environment, file), FastAPI, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megakernel_runtime.interface import MAX_TOP_LOGPROBS, RuntimeSpec
from server.scheduling.settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one request may ask; beyond them the answer is 400 or 413, naming value and limit."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_json_depth: int = 64
    max_n: int = 128
    max_stop_strings: int = 4
    max_stop_characters: int = 1024  # of each
    max_logit_bias: int = 1024
    max_stop_token_ids: int = 128
    max_prompts: int = 256
    max_choices: int = 1024  # prompts * n
    max_top_logprobs: int = MAX_TOP_LOGPROBS
    max_bad_words: int = 128
    request_deadline_seconds: float = 600.0  # from receipt to the last token; 0 = none
    max_concurrent_per_key: int = 0  # 0 = no bound of its own
    body_timeout_seconds: float = 60.0  # from the head of a request to the end of its body
    keep_alive_seconds: float = 15.0  # a stream that was silent for so long gets a comment


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Everything a server process needs to start. Logged once at start-up, without `api_keys`."""

    host: str
    port: int  # 0: the system picks a free one
    served_names: tuple[str, ...]  # the first is what responses carry, the others are aliases; never empty
    model_path: Path  # a Hugging Face directory or a .gguf file, present on this machine
    runtime: RuntimeSpec
    scheduler: SchedulerSettings
    limits: Limits = Limits()
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: no key is asked for
    drain_seconds: float = 30.0
    metrics_public: bool = True  # /metrics without a key
    cors_origins: tuple[str, ...] = ()  # empty: no CORS headers
    log_level: str = "info"  # debug | info | warning | error
    log_format: str = "console"  # console | json
