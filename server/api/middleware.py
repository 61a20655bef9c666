"""What happens around every request: its id, its log record, its metrics, and an answer whatever breaks inside.

Must not know: what routes do.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.body import header
from server.api.sending import send_error
from server.errors import as_api_error
from server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # nginx's number for a client that left before the answer; never sent
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
QUIET = frozenset({"/live", "/ready", "/health", "/metrics"})  # asked every few seconds by machines

FACTS = "megakernel.facts"  # key of a scope: a function that returns what its route adds to the log record

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestMiddleware:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and tell log and metrics how."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        asked = header(scope, b"x-request-id") or ""
        request_id = asked if _SANE_ID.fullmatch(asked) else uuid.uuid4().hex
        response = _Response(send, request_id)
        try:
            await self._app(scope, receive, response.send)
        except ClientDisconnect:
            pass
        except Exception as error:
            logger.exception("request failed", extra={"request_id": request_id})
            if response.status is not None:
                raise
            await send_error(response.send, as_api_error(error))
        finally:
            self._tell(scope, request_id, response.status or CLIENT_CLOSED, time.monotonic() - started)

    def _tell(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")  # a pattern: paths themselves are without number
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.http(handler=route, method=method, status=status, seconds=seconds)
        facts: dict[str, Any] = {"request_id": request_id, "method": method, "route": route, "status": status}
        facts |= {"seconds": round(seconds, 4), **scope.get(FACTS, dict[str, Any])()}
        logger.log(logging.DEBUG if route in QUIET else logging.INFO, "request finished", extra=facts)


class _Response:
    """Passes a response on, with the request's id in its head; remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._id_header = (b"x-request-id", request_id.encode())
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), self._id_header]}
        await self._send(message)
