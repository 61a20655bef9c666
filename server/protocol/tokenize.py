"""The requests of /tokenize and /detokenize, as vLLM has them. Must not know: tokenizers."""

from __future__ import annotations

from pydantic import Field

from server.protocol.base import RequestModel
from server.protocol.chat import TemplateFields
from server.protocol.values import TokenIds


class TokenizeTextRequest(RequestModel):
    """A text whose tokens are asked for."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = Field(True, description="As a prompt of /v1/completions begins.")
    return_token_strs: bool = Field(False, description="Give each token's text too.")


class TokenizeChatRequest(TemplateFields):
    """A conversation whose prompt's tokens are asked for."""

    model: str | None = None
    return_token_strs: bool = Field(False, description="Give each token's text too.")


class DetokenizeRequest(RequestModel):
    """Token ids whose text is asked for."""

    model: str | None = None
    tokens: TokenIds
