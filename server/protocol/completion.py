"""The request of /v1/completions. Must not know: tokenizers, the engine."""

from __future__ import annotations

from pydantic import Field

from server.protocol.generation import GenerationRequest
from server.protocol.values import Prompt

DEFAULT_MAX_TOKENS = 16  # OpenAI's, when neither max_tokens nor max_completion_tokens is given


class CompletionRequest(GenerationRequest):
    """A text to be continued. Text that spells a control token is one here: the whole prompt is the caller's."""

    prompt: Prompt
    echo: bool = Field(False, description="Put the prompt before the text.")
    logprobs: int | None = Field(None, ge=0, description="Give the logprob of each token and of so many alternatives.")
    best_of: int | None = Field(None, ge=1, description="Only n itself.")
    add_special_tokens: bool = Field(True, description="Begin the prompt as the model expects (bos), if it is a text.")
