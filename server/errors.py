"""Every error that a client can see, and the one table from exception to (status, OpenAI error body).

Must not know: FastAPI. Each message carries the value, the limit and the remedy.
"""

from __future__ import annotations

import math


class MegakernelError(Exception):
    """Base of all errors that this server raises on purpose."""


class ConfigError(MegakernelError):
    """The operator's settings cannot be used. Shown at start-up, exit code 2."""


class ModelError(MegakernelError):
    """A model file cannot be served; the message names the file and the tensor or key."""


class ApiError(MegakernelError):
    """An error with an HTTP status and an OpenAI error body `{"error": {message, type, param, code}}`."""

    status = 500
    type = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(ApiError):
    """400: the request cannot be honoured as it stands."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    """401: no key, or a wrong one."""

    status = 401
    type = "authentication_error"


class NotFound(ApiError):
    """404: no such route or model."""

    status = 404
    type = "not_found_error"


class MethodNotAllowed(ApiError):
    """405."""

    status = 405
    type = "invalid_request_error"


class RequestTimeout(ApiError):
    """408: the body did not arrive in time."""

    status = 408
    type = "invalid_request_error"


class TooLarge(ApiError):
    """413: the body is over the limit."""

    status = 413
    type = "invalid_request_error"


class UnsupportedMedia(ApiError):
    """415: the body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"


class Overloaded(ApiError):
    """429: the queue is full; carries Retry-After."""

    status = 429
    type = "rate_limit_error"


class NotReady(ApiError):
    """503: loading, draining or restarting; carries Retry-After."""

    status = 503
    type = "service_unavailable_error"


class EngineFault(ApiError):
    """500: the engine lost the request."""

    status = 500
    type = "server_error"


class DeadlineExceeded(ApiError):
    """504: the request's time was over before its answer was complete. The same again would take as long."""

    status = 504
    type = "timeout_error"


def error_body(error: ApiError) -> dict[str, dict[str, str | None]]:
    """Return what a client gets to read, in OpenAI's shape."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def retry_headers(error: ApiError) -> dict[str, str]:
    """Return Retry-After (whole seconds, rounded up) and retry-after-ms; empty where coming back does not help."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(error.retry_after_s))),
        "retry-after-ms": str(max(1, round(error.retry_after_s * 1000))),
    }


def as_api_error(error: BaseException) -> ApiError:
    """Return the error as clients are told of it: our own as they are, any other without its inside."""
    if isinstance(error, ApiError):
        return error
    return EngineFault("internal error; the server's log has the details", code="internal_error")
