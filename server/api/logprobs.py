"""Tokens of an output -> OpenAI's two forms of logprobs. Must not know: chunks, requests."""

from __future__ import annotations

from collections.abc import Sequence

from server.protocol.responses import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from server.text.pipeline import OutputToken


def chat_logprobs(tokens: Sequence[OutputToken]) -> ChatLogprobs:
    """Return the form of chat completions. Each token must have a logprob."""
    return ChatLogprobs([_chat_entry(token) for token in tokens])


def _chat_entry(token: OutputToken) -> TokenLogprob:
    top = [TopLogprob(entry.text, entry.logprob, list(entry.raw)) for entry in token.top]
    return TokenLogprob(token.text, _known(token), list(token.raw), top)


def text_logprobs(tokens: Sequence[OutputToken]) -> TextLogprobs:
    """Return the form of text completions: the chosen token is always among `top_logprobs`."""
    return TextLogprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[_known(token) for token in tokens],
        top_logprobs=[
            {entry.text: entry.logprob for entry in token.top} | {token.text: _known(token)} for token in tokens
        ],
        text_offset=[token.offset for token in tokens],
    )


def _known(token: OutputToken) -> float:
    assert token.logprob is not None, "logprobs were not asked for"
    return token.logprob
