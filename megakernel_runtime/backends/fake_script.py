"""What the fake runtime does, read from JSON: which tokens it makes, how long it takes, when it fails.

Knows the script's keys and the fake's "logits". Must not know: slots, plans, devices.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from megakernel_runtime.interface import ModelError, SamplingParams
from megakernel_runtime.program.slots import Choice

MASK64 = (1 << 64) - 1
EMITS = ("random", "echo", "cycle", "text")
N_CANDIDATES = 32  # tokens with a chance at each position, besides those with a bias


@dataclass(frozen=True, slots=True)
class FakeScript:
    """Keys of `RuntimeSpec.fake_script`. Raises ModelError for what is unknown or cannot be.

    `emit`: "random" draws from (sampling seed, index, previous token); "echo" repeats the prompt; "cycle" goes round
    `ids`; "text" gives `ids` once. After echo and text comes `end_id` for ever, or they begin again without one.
    """

    emit: str = "random"
    ids: tuple[int, ...] = ()
    end_id: int | None = None
    vocab_size: int = 49152
    step_seconds: float = 0.0
    row_seconds: float = 0.0  # further time for each token computed
    load_seconds: float = 0.0
    model_error: str = ""  # loading raises ModelError with this message
    capacity_error: str = ""  # loading raises CapacityError with this message
    fault_at_step: int = 0  # RuntimeFault in the n-th step since loading; 0 = never
    stall_at_step: int = 0  # no result from the n-th step on
    hang_at_step: int = 0  # the n-th step never returns to its caller
    exit_at_step: int = 0  # the process ends without a word in the n-th step
    max_lease_steps: int = 1
    max_plans_ahead: int = 1

    def __post_init__(self) -> None:
        """Refuse scripts that could not be played."""
        if self.emit not in EMITS:
            raise ModelError(f"fake script: emit is {self.emit!r}; known are {', '.join(EMITS)}")
        if self.emit in ("cycle", "text") and not self.ids:
            raise ModelError(f"fake script: emit {self.emit!r} needs ids")
        named = (*self.ids, *(() if self.end_id is None else (self.end_id,)))
        if not all(0 <= token < self.vocab_size for token in named):
            raise ModelError(f"fake script: an id lies outside the vocabulary of {self.vocab_size}")


def read_script(text: str) -> FakeScript:
    """Return the script that JSON `text` describes; empty text is the default. Raises ModelError."""
    try:
        raw: dict[str, Any] = json.loads(text) if text else {}
        if unknown := set(raw) - {field.name for field in fields(FakeScript)}:
            raise ModelError(f"fake script: unknown keys {', '.join(sorted(unknown))}")
        if "ids" in raw:
            raw["ids"] = tuple(int(token) for token in raw["ids"])
        return FakeScript(**raw)
    except (ValueError, TypeError) as error:
        raise ModelError(f"fake script is no valid JSON object of its keys: {error}") from None


def next_token(script: FakeScript, tokens: Sequence[int], prompt_len: int, sampling: SamplingParams) -> int:
    """Return the most probable token after `tokens`, before sampling parameters are looked at."""
    index = len(tokens) - prompt_len
    if script.emit == "random":
        return _mix(sampling.seed ^ _mix(index << 32 ^ tokens[-1])) % script.vocab_size
    if script.emit == "cycle":
        return script.ids[index % len(script.ids)]
    source = tokens[:prompt_len] if script.emit == "echo" else script.ids
    if index >= len(source) and script.end_id is not None:
        return script.end_id
    return source[index % len(source)]


def choose(script: FakeScript, tokens: Sequence[int], prompt_len: int, sampling: SamplingParams) -> Choice:
    """Return the token that follows. The best is always taken, whatever the temperature: the
    scripted token has logit 0, the i-th id after it -i ln 2; penalties, bias, masks act on these.
    """
    token = next_token(script, tokens, prompt_len, sampling)
    n_output = len(tokens) - prompt_len
    if not _alters(sampling, token, n_output):
        return Choice(token)
    logits = _adjusted(_candidates(script, token, sampling), tokens, prompt_len, sampling)
    ranked = sorted(logits.items(), key=lambda item: (-item[1], item[0]))
    banned = sampling.stop_token_ids if n_output < sampling.min_tokens else ()
    best = next((item for item in ranked if item[0] not in banned), ranked[0])
    if sampling.top_logprobs is None:
        return Choice(best[0])
    norm = math.log(math.fsum(math.exp(logit) for logit in logits.values()))
    top = tuple((candidate, logit - norm) for candidate, logit in ranked[: sampling.top_logprobs])
    return Choice(best[0], best[1] - norm, top)


def _alters(sampling: SamplingParams, token: int, n_output: int) -> bool:
    """Whether the sampling parameters can change the token or ask for logprobs."""
    return (
        sampling.top_logprobs is not None
        or bool(sampling.logit_bias or sampling.allowed_token_ids)
        or (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)
        or (n_output < sampling.min_tokens and token in sampling.stop_token_ids)
    )


def _candidates(script: FakeScript, token: int, sampling: SamplingParams) -> dict[int, float]:
    """Return the ids with a chance and their logits."""
    allowed = set(sampling.allowed_token_ids)
    logits = {(token + i) % script.vocab_size: -i * math.log(2) for i in range(min(N_CANDIDATES, script.vocab_size))}
    floor = -N_CANDIDATES * math.log(2)
    logits.update({candidate: floor for candidate, _ in sampling.logit_bias if candidate not in logits})
    if allowed:
        logits = {candidate: logits.get(candidate, floor) for candidate in sorted(allowed)}
    return logits


def _adjusted(
    logits: dict[int, float], tokens: Sequence[int], prompt_len: int, sampling: SamplingParams
) -> dict[int, float]:
    """Return the logits after penalties and bias, in the order of `SamplingParams`."""
    seen, output = set(tokens), Counter(tokens[prompt_len:])
    bias = dict(sampling.logit_bias)
    out: dict[int, float] = {}
    for token, value in logits.items():
        logit = value
        if token in seen:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        if token in output:
            logit -= sampling.presence_penalty + sampling.frequency_penalty * output[token]
        out[token] = logit + bias.get(token, 0.0)
    return out


def _mix(value: int) -> int:
    """Return a scrambled 64-bit number (the finaliser of SplitMix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)
