"""Every error leaves as an OpenAI error body `{"error": {message, type, param, code}}`, whatever raised it.

Must not know: routes.
"""

from __future__ import annotations

import logging
import math

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from server.errors import ApiError, EngineFault, InvalidRequest, MethodNotAllowed, NotFound

logger = logging.getLogger(__name__)


def error_response(error: ApiError) -> JSONResponse:
    """Return the response to an error, with Retry-After in seconds and milliseconds where there is one."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(round(error.retry_after_s * 1000))
    body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return JSONResponse({"error": body}, status_code=error.status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer our errors, unknown routes and methods, and bugs in the one error format."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        return error_response(_translated(request, error))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(EngineFault("internal error; the server's log has the details"))


def _translated(request: Request, error: HTTPException) -> ApiError:
    if error.status_code == NotFound.status:
        return NotFound(f"no such route: {request.url.path}; /openapi.json lists all")
    if error.status_code == MethodNotAllowed.status:
        return MethodNotAllowed(f"{request.url.path} does not answer {request.method}")
    return InvalidRequest(str(error.detail))
