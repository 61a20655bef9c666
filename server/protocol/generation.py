"""The fields that chat and text completions share: how to sample, when to stop, what to tell.

Bounds that stand here are the protocol's; those an operator may change are checked in parse.py.
Must not know: prompts, tokenizers, the engine.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from server.protocol.base import RequestModel
from server.protocol.values import Accepted, LogitBias, Stops, TokenIds

MAX_TOKENS = 2**31 - 1
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"

Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class StreamOptions(RequestModel):
    """What a stream tells beside the text."""

    include_usage: bool = Field(default=False, description="Send one last chunk with the usage and no choices.")
    continuous_usage_stats: bool = Field(default=False, description="Send the usage so far with every chunk.")


class GenerationRequest(RequestModel):
    """Sampling as OpenAI has it, extensions as vLLM spells them."""

    model: str | None = Field(None, description="A served name; the server's first model when left out.")
    n: int = Field(1, ge=1, description="Choices per prompt.")
    temperature: float = Field(1.0, ge=0, le=2, description="0 always takes the most probable token.")
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_TOKENS, description="0 or -1: off.")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="1: off.")
    logit_bias: LogitBias = ()
    allowed_token_ids: TokenIds | None = Field(None, description="Only these tokens may be generated.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Left out: random.")
    max_tokens: Count | None = Field(None, description="Cut down to what the context leaves.")
    max_completion_tokens: Count | None = Field(None, description="The same as max_tokens.")
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS, description="Neither stop tokens nor stop strings before.")
    stop: Stops = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = Field(False, description="Go on after the model's end tokens.")
    include_stop_str_in_output: bool = Field(False, description="Keep what stopped the text in it.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    stream: bool = False
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    return_token_ids: bool = Field(False, description="Give the ids of prompt and generated tokens too.")
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="Smaller runs first.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Requests share cached prompts only with the same salt."
    )
    request_id: str | None = Field(None, pattern=REQUEST_ID, description="Part of the response's id.")
    user: Accepted
    metadata: Accepted
    store: Accepted
    service_tier: Accepted
    safety_identifier: Accepted
    prompt_cache_key: Accepted
    prompt_cache_retention: Accepted
    prompt_cache_options: Accepted
