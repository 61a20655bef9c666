"""Bodies of responses, as OpenAI has them (and vLLM, for what OpenAI has not). Must not know: requests, the engine."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What is known of the prompt's tokens."""

    cached_tokens: int  # whose keys and values were found in the prefix cache


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request: each prompt counts once, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Return the usage of these counts."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens),
    )


# ---------------------------------------------------------------- chat


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most probable tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """All tokens of a choice, or of a chunk of it."""

    content: list[TokenLogprob]


class AssistantMessage(msgspec.Struct, frozen=True):
    """The answer."""

    role: str
    content: str


class ChatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer. `token_ids` only where asked for."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The response of /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


# ---------------------------------------------------------------- text


class TextLogprobs(msgspec.Struct, frozen=True):
    """All tokens of a choice, or of a chunk of it, in parallel lists; offsets are characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One text. The ids only where asked for."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(msgspec.Struct, frozen=True):
    """The response of /v1/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


# ---------------------------------------------------------------- models, tokens


class ModelCard(msgspec.Struct, frozen=True):
    """One served name. `max_model_len` is null until the model is loaded."""

    id: str
    created: int
    max_model_len: int | None
    root: str  # what the names stand for: the first of them
    object: str = "model"
    owned_by: str = "megakernel"


class ModelList(msgspec.Struct, frozen=True):
    """The response of /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Tokenized(msgspec.Struct, frozen=True, omit_defaults=True):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The response of /detokenize."""

    prompt: str
