"""Deltas -> the bytes of server-sent events, put together by hand: what never changes in a stream is encoded once.

Must not know: sockets, the engine, when something is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from server.api.generation import ChoiceDelta
from server.api.logprobs import chat_logprobs, text_logprobs
from server.errors import ApiError, error_body
from server.protocol.responses import Usage
from server.text.pipeline import OutputToken

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream which cannot go on."""
    return b"data: " + _encode(error_body(error)) + b"\n\n" + DONE


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """What is the same in all chunks of a stream, and what was asked for."""

    id: str
    created: int
    model: str
    logprobs: bool
    token_ids: bool  # return_token_ids
    prompts: tuple[tuple[int, ...], ...]
    include_usage: bool


class Chunks(Protocol):
    """Writes the events of one stream."""

    def delta(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        """Return the events that tell of `delta`, maybe none. `usage`: so far, where it is asked for."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """Return the last event before the end: the usage, and no choices."""
        ...


class _Writer:
    """The parts that both kinds of chunks have."""

    def __init__(self, shape: ChunkShape, kind: str) -> None:
        self._shape = shape
        head = {"id": shape.id, "object": kind, "created": shape.created, "model": shape.model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if shape.include_usage else b"}\n\n"
        self._held_ids: dict[int, tuple[int, ...]] = {}  # choice -> ids whose text is held back

    def usage(self, usage: Usage) -> bytes:
        """See Chunks."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def _event(self, choice: bytes, usage: Usage | None, extra: bytes = b"") -> bytes:
        tail = self._tail if usage is None else b',"usage":' + _encode(usage) + b"}\n\n"
        return self._head + choice + b"]" + extra + tail

    def _ids(self, delta: ChoiceDelta) -> bytes:
        """Return the field token_ids: all that came since the last event of this choice."""
        if not self._shape.token_ids:
            return b""
        return b',"token_ids":' + _encode(self._held_ids.pop(delta.index, ()) + delta.token_ids)

    def _hold(self, delta: ChoiceDelta) -> None:
        if self._shape.token_ids and delta.token_ids:
            self._held_ids[delta.index] = self._held_ids.get(delta.index, ()) + delta.token_ids


class ChatChunks(_Writer):
    """Chunks of /v1/chat/completions: role, contents, finish, each an event of its own."""

    def __init__(self, shape: ChunkShape) -> None:
        super().__init__(shape, "chat.completion.chunk")

    def delta(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        """See Chunks."""
        out = self._role(delta, usage) if delta.first else b""
        if delta.text or (self._shape.logprobs and delta.tokens):
            out += self._content(delta, usage)
        else:
            self._hold(delta)
        return out if delta.finish is None else out + self._finish(delta, usage)

    def _role(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        extra = b""
        if self._shape.token_ids:
            extra = b',"prompt_token_ids":' + _encode(self._shape.prompts[0])
        return self._event(choice % delta.index, usage, extra)

    def _content(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        shown = b"null" if not self._shape.logprobs else _encode(chat_logprobs(delta.tokens))
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % (
            delta.index,
            _encode(delta.text),
            shown,
            self._ids(delta),
        )
        return self._event(choice, usage)

    def _finish(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        held = self._held_ids.pop(delta.index, ())
        ids = b',"token_ids":' + _encode(held) if held else b""
        choice = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b%b}'
        return self._event(choice % (delta.index, _encode(delta.finish), ids), usage)


class TextChunks(_Writer):
    """Chunks of /v1/completions: text, with the finish in the last one."""

    def __init__(self, shape: ChunkShape, n: int) -> None:
        super().__init__(shape, "text_completion")
        self._n = n
        self._told_prompt: set[int] = set()  # choices

    def delta(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        """See Chunks."""
        if not (delta.text or delta.finish or (self._shape.logprobs and delta.tokens)):
            self._hold(delta)
            return b""
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b%b}' % (
            delta.index,
            _encode(delta.text),
            self._logprobs(delta.tokens),
            _encode(delta.finish),
            self._ids(delta),
            self._prompt_ids(delta.index),
        )
        return self._event(choice, usage)

    def _prompt_ids(self, index: int) -> bytes:
        """Return the field prompt_token_ids for the first event of a choice."""
        if not self._shape.token_ids or index in self._told_prompt:
            return b""
        self._told_prompt.add(index)
        return b',"prompt_token_ids":' + _encode(self._shape.prompts[index // self._n])

    def _logprobs(self, tokens: tuple[OutputToken, ...]) -> bytes:
        return b"null" if not self._shape.logprobs else _encode(text_logprobs(tokens))
