"""Every error leaves as an OpenAI error body, also those that the framework raises. Must not know: routes.

Bugs are answered in middleware.py, outside of everything.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from server.errors import (
    ApiError,
    DeadlineExceeded,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestTimeout,
    TooLarge,
    error_body,
    retry_headers,
)


def error_headers(error: ApiError) -> dict[str, str]:
    """Return the headers of an error's response: when to come back, and whether the connection is of further use."""
    headers = retry_headers(error)
    if isinstance(error, RequestTimeout | TooLarge):  # the rest of the body will not be read
        headers["connection"] = "close"
    if isinstance(error, DeadlineExceeded):  # OpenAI's clients would try again by themselves
        headers["x-should-retry"] = "false"
    return headers


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer our errors, and unknown routes and methods, in the one error format."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error_body(error), status_code=error.status, headers=error_headers(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = _translated(request, error)
    return JSONResponse(error_body(told), status_code=told.status, headers=error.headers)


def _translated(request: Request, error: HTTPException) -> ApiError:
    path = str(request.scope["path"])[:200]
    if error.status_code == NotFound.status:
        return NotFound(f"There is no route {path}; /openapi.json lists all", code="route_not_found")
    if error.status_code == MethodNotAllowed.status:
        allowed = (error.headers or {}).get("Allow", "other methods")
        return MethodNotAllowed(
            f"{path} does not answer {request.method}; it answers {allowed}", code="method_not_allowed"
        )
    return InvalidRequest(str(error.detail))
