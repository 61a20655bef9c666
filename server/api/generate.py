"""The two routes that generate, /v1/chat/completions and /v1/completions: a request's whole life in `__call__`.

Bare ASGI: nothing stands between a token and the socket. Must not know: how requests are judged, how text is made.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import ClassVar

from starlette.types import Receive, Scope, Send

from server.api.body import read_json_body
from server.api.chunks import ChatChunks, Chunks, ChunkShape, TextChunks
from server.api.collect import Collected, chat_completion, collect, text_completion
from server.api.generation import Disconnected, Generation
from server.api.job import Job, chat_job, completion_job
from server.api.keys import key_of
from server.api.middleware import FACTS
from server.api.sending import EventStream, send_json, usage_so_far
from server.api.service import Loaded, Service
from server.protocol.chat import ChatRequest
from server.protocol.completion import CompletionRequest
from server.protocol.generation import GenerationRequest, StreamOptions
from server.protocol.parse import parse_chat, parse_completion
from server.protocol.responses import ChatCompletion, TextCompletion, Usage

INLINE_BYTES = 16 * 1024  # larger bodies are judged in a thread: it takes milliseconds, and streams must not wait


class GenerateRoute(ABC):
    """An ASGI application."""

    path: ClassVar[str]

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError for whatever is wrong before the first byte is sent."""
        service, received_at = self._service, time.monotonic()
        scope["route"] = self  # as the framework's own routes do: log and metrics name it
        loaded = service.admit()
        raw = await read_json_body(scope, receive, service.plan.limits)
        if len(raw) <= INLINE_BYTES:
            request, job = self._judge(raw, loaded)
        else:
            request, job = await asyncio.to_thread(self._judge, raw, loaded)
        options = request.stream_options or StreamOptions()
        shape = self._shape(request, job, options)
        with service.occupied(key_of(scope)), suppress(Disconnected):
            generation = Generation(job, service.engine, service.metrics, received_at)
            scope[FACTS] = lambda: _facts(request, generation)
            async with generation, _watched(receive, generation):
                await generation.admitted()
                if request.stream:
                    stream = EventStream(
                        self._chunks(shape, job),
                        service.metrics,
                        keep_alive_s=service.plan.limits.keep_alive_seconds,
                        usage=options.include_usage,
                        continuous=options.continuous_usage_stats,
                    )
                    await stream.send(generation, send)
                else:
                    choices = await collect(generation)
                    await send_json(send, self._whole(shape, choices, usage_so_far(generation)))

    def _judge(self, raw: bytes, loaded: Loaded) -> tuple[GenerationRequest, Job]:
        """Validate, render, tokenize. Raises ApiError."""
        request = self._parse(raw)
        self._service.check_model(request.model)
        return request, self._job(request, loaded)

    def _shape(self, request: GenerationRequest, job: Job, options: StreamOptions) -> ChunkShape:
        return ChunkShape(
            id=job.id,
            created=int(time.time()),
            model=self._service.check_model(request.model),
            logprobs=job.submits[0].sampling.top_logprobs is not None,
            token_ids=request.return_token_ids,
            prompts=tuple(submit.prompt for submit in job.submits),
            include_usage=options.include_usage,
        )

    @abstractmethod
    def _parse(self, raw: bytes) -> GenerationRequest: ...

    @abstractmethod
    def _job(self, request: GenerationRequest, loaded: Loaded) -> Job: ...

    @abstractmethod
    def _chunks(self, shape: ChunkShape, job: Job) -> Chunks: ...

    @abstractmethod
    def _whole(self, shape: ChunkShape, choices: list[Collected], usage: Usage) -> ChatCompletion | TextCompletion: ...


class ChatRoute(GenerateRoute):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"

    def _parse(self, raw: bytes) -> ChatRequest:
        return parse_chat(raw, self._service.plan.limits)

    def _job(self, request: GenerationRequest, loaded: Loaded) -> Job:
        assert isinstance(request, ChatRequest)
        return chat_job(request, loaded, self._service.plan.limits)

    def _chunks(self, shape: ChunkShape, job: Job) -> Chunks:
        del job  # a conversation is one prompt
        return ChatChunks(shape)

    def _whole(self, shape: ChunkShape, choices: list[Collected], usage: Usage) -> ChatCompletion:
        return chat_completion(shape, choices, usage)


class CompletionRoute(GenerateRoute):
    """POST /v1/completions."""

    path = "/v1/completions"

    def _parse(self, raw: bytes) -> CompletionRequest:
        return parse_completion(raw, self._service.plan.limits)

    def _job(self, request: GenerationRequest, loaded: Loaded) -> Job:
        assert isinstance(request, CompletionRequest)
        return completion_job(request, loaded, self._service.plan.limits)

    def _chunks(self, shape: ChunkShape, job: Job) -> Chunks:
        return TextChunks(shape, job.n)

    def _whole(self, shape: ChunkShape, choices: list[Collected], usage: Usage) -> TextCompletion:
        return text_completion(shape, choices, usage)


def _facts(request: GenerationRequest, generation: Generation) -> dict[str, object]:
    """Return what the log tells of a generation: sizes and speed, nothing that anybody wrote."""
    return {
        "stream": request.stream,
        "prompt_tokens": generation.job.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "completion_tokens": generation.completion_tokens,
        "first_token_seconds": generation.first_token_s and round(generation.first_token_s, 4),
    }


@asynccontextmanager
async def _watched(receive: Receive, generation: Generation) -> AsyncGenerator[None]:
    """Abandon the generation as soon as the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abandon()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
