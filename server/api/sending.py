"""Responses on bare ASGI: JSON, errors, and the stream of server-sent events. Must not know: routes, requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from starlette.types import Send

from server.api.chunks import DONE, KEEP_ALIVE, Chunks, error_event
from server.api.errors import error_headers
from server.api.generation import Disconnected, Generation
from server.errors import ApiError, as_api_error, error_body
from server.protocol.responses import Usage, usage_of
from server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def send_bytes(send: Send, body: bytes, *, status: int = 200, headers: dict[str, str]) -> None:
    """Send a whole response."""
    listed = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    listed.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
    """Send a whole response with a JSON body."""
    await send_bytes(
        send, _encode(value), status=status, headers={"content-type": "application/json", **(headers or {})}
    )


async def send_error(send: Send, error: ApiError, headers: dict[str, str] | None = None) -> None:
    """Send an error as the whole response."""
    await send_json(send, error_body(error), status=error.status, headers=error_headers(error) | (headers or {}))


def usage_so_far(generation: Generation) -> Usage:
    """Return the usage of what was generated until now."""
    return usage_of(generation.job.prompt_tokens, generation.completion_tokens, generation.cached_tokens)


class EventStream:
    """Sends one generation as events: deltas as they come, comments into silence, errors as events, an end always."""

    def __init__(self, chunks: Chunks, metrics: Metrics, *, keep_alive_s: float, usage: bool, continuous: bool) -> None:
        self._chunks = chunks
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._usage = usage
        self._continuous = continuous

    async def send(self, generation: Generation, send: Send) -> None:
        """Send everything. Raises Disconnected when the client has gone; whatever else goes wrong is told to it."""
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        silence = _Silence(self._keep_alive_s, generation.wake)
        try:
            end = await self._send_deltas(generation, send, silence)
        except Disconnected:
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("stream failed")
            end = error_event(as_api_error(error))  # the status line is long gone
        finally:
            silence.close()
        await send({"type": "http.response.body", "body": end})

    async def _send_deltas(self, generation: Generation, send: Send, silence: _Silence) -> bytes:
        """Send until the last choice has ended; return the bytes that end the stream."""
        while (deltas := await generation.deltas()) is not None:
            usage = usage_so_far(generation) if self._continuous and deltas else None
            body = b"".join([self._chunks.delta(delta, usage) for delta in deltas])
            if not body and silence.due():
                body = KEEP_ALIVE
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                silence.broken()
                now_ns = time.monotonic_ns()
                for delta in deltas:
                    if delta.device_ns and delta.token_ids:
                        self._metrics.delivery(max(0, now_ns - delta.device_ns) / 1e9)
        return (self._chunks.usage(usage_so_far(generation)) if self._usage else b"") + DONE


class _Silence:
    """Calls `wake` when nothing was sent for a while. One timer for the whole stream: sending costs it nothing."""

    def __init__(self, interval_s: float, wake: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_at(self._last + interval_s, self._look)

    def due(self) -> bool:
        """Whether nothing was sent for the interval."""
        return self._loop.time() - self._last >= self._interval_s

    def broken(self) -> None:
        """Something was sent."""
        self._last = self._loop.time()

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        if self.due():
            self._wake()
            next_look = self._loop.time() + self._interval_s
        else:
            next_look = self._last + self._interval_s
        self._timer = self._loop.call_at(next_look, self._look)
