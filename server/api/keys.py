"""Guards every route but a few with API keys. Judged on the raw path: what is not literally an open route is guarded.

Keys are kept and compared as hashes, in constant time. Must not know: routes' meaning.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.body import header
from server.api.sending import send_error
from server.errors import Unauthorized

OPEN_PATHS = frozenset({b"/live", b"/ready", b"/health"})
METRICS_PATH = b"/metrics"

_SCOPE_KEY = "megakernel.api_key"


def key_of(scope: Scope) -> int | None:
    """Return which of the API keys this request came with; None where none is asked for."""
    return scope.get(_SCOPE_KEY)


class KeyGuard:
    """Answers 401 to requests without a known key; lets everything through when there are no keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], *, metrics_public: bool) -> None:
        self._app = app
        self._hashes = [_hash(key.encode()) for key in keys]
        self._open = OPEN_PATHS | {METRICS_PATH} if metrics_public else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through or refuse."""
        if scope["type"] != "http" or not self._hashes or scope.get("raw_path") in self._open:
            await self._app(scope, receive, send)
            return
        given = header(scope, b"authorization")
        key = self._known(given)
        if key is None:
            wrong = "no API key was given" if given is None else "the API key is wrong"
            error = Unauthorized(
                f"{wrong}; send 'Authorization: Bearer <key>' with a key of this server", code="invalid_api_key"
            )
            await send_error(send, error, {"www-authenticate": "Bearer"})
            return
        scope[_SCOPE_KEY] = key
        await self._app(scope, receive, send)

    def _known(self, given: str | None) -> int | None:
        """Return the index of the key in the header's value. All keys are compared, whichever it is."""
        scheme, _, key = (given or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        hashed = _hash(key.strip().encode("latin-1"))  # the bytes that were sent
        matches = [i for i, known in enumerate(self._hashes) if hmac.compare_digest(hashed, known)]
        return matches[0] if matches else None


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
