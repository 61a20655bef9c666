"""One client's connection: bounds on the head of a request, in bytes and time, and errors of the wire in our own form.

What the HTTP library leaves open. Must not know: routes, what is in a body.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

import msgspec
import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import InvalidRequest, error_body

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024  # of request line and headers; counted in pieces as they arrive, so it may be some more
HEAD_WITHIN_S = 30.0  # from the opening, or the first byte of a further request
GRACE_S = 5  # after the drain, for responses whose last bytes are on their way


def server_config(app: Any, connection: type[Connection] | None = None) -> uvicorn.Config:
    """Return how uvicorn is to run `app`."""
    return uvicorn.Config(
        app,
        http=connection or Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )


class Connection(HttpToolsProtocol):
    """Hangs up on clients that never come to the point."""

    max_head_bytes = MAX_HEAD_BYTES
    head_within_s = HEAD_WITHIN_S

    _in_head = False
    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client has connected; its first request is awaited."""
        super().connection_made(transport)
        self._watch()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._unwatch()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        """Take what has come, unless it is too much for a head."""
        before = self._in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if before and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(f"the request's head has more than {self.max_head_bytes} bytes; send fewer headers")
                return
        answering = self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison] (None at first)
        if answering:
            self._unwatch()
        else:
            self._watch()

    @override
    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        """A head is complete."""
        self._in_head = False
        super().on_headers_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or not ours."""
        self._refuse("this is no valid HTTP/1.1 request; TLS and HTTP/2 are not spoken here: use http:// and HTTP/1.1")

    @override
    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a server may ignore an upgrade, and answers as if none was asked for."""

    def _refuse(self, message: str) -> None:
        error = InvalidRequest(message, code="invalid_http")
        body = msgspec.json.encode(error_body(error))
        head = (
            "HTTP/1.1 400 Bad Request\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: {uuid.uuid4().hex}\r\n"
            "connection: close\r\n\r\n"
        )
        if self.cycle is None or self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison] (None at first)
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_within_s, self._hang_up)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        logger.debug("no request came in time")
        self.transport.close()
