"""Reads a request's body, within its bounds of size and time. Must not know: what is in it."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from server.errors import InvalidRequest, RequestTimeout, TooLarge, UnsupportedMedia
from server.plan import Limits


def header(scope: Scope, name: bytes) -> str | None:
    """Return a header's (first) value."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def read_json_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return the whole body. Raises TooLarge as soon as it is known to be, RequestTimeout, UnsupportedMedia (a page of
    another origin can send anything but JSON without asking), ClientDisconnect.
    """
    declared = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if declared != "application/json":
        message = f"Content-Type is {declared[:100]!r}; send 'Content-Type: application/json'"
        raise UnsupportedMedia(message, code="unsupported_media_type")
    coding = (header(scope, b"content-encoding") or "identity").strip().lower()
    if coding != "identity":
        message = f"Content-Encoding is {coding[:100]!r}; send the body as it is"
        raise UnsupportedMedia(message, code="unsupported_media_type")
    length = header(scope, b"content-length")
    if length is not None and length.isdecimal():
        _check_size(int(length), limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout_seconds):
            body = await _read(receive, limits.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout_seconds:g} s; send it faster"
        raise RequestTimeout(message, code="request_timeout") from None
    if not body:
        raise InvalidRequest("the body is empty; send a JSON object", code="invalid_json")
    return body


async def _read(receive: Receive, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        _check_size(size, limit_bytes)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        message = f"the body has {size} bytes or more; it must have at most {limit}: send less at once"
        raise TooLarge(message, code="request_too_large")
