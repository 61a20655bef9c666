"""The API's end of one connection to an engine, on asyncio. Knows frames. Must not know: requests, processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

from typing_extensions import override

from server.engine.messages import ApiToEngine, EngineToApi
from server.engine.wire import FrameError, FrameReader, api_reader, encode

logger = logging.getLogger(__name__)


class EngineLink(asyncio.Protocol):
    """Hands each message to `on_message`, in order. `lost` is done when the connection is gone."""

    def __init__(self, on_message: Callable[[EngineToApi], None]) -> None:
        self._on_message = on_message
        self._reader: FrameReader[EngineToApi] = api_reader()
        self._transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard = False  # something has come since this was last set to False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        """Split into messages; hang up on what cannot be read."""
        self.heard = True
        try:
            messages = self._reader.feed(data)
        except FrameError:
            logger.exception("the engine's frames cannot be read")
            self.close()
            return
        for message in messages:
            self._on_message(message)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits for `lost`."""
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, message: ApiToEngine) -> bool:
        """Send a message without waiting; return False if the connection is gone."""
        if self._transport is None or self._transport.is_closing():
            return False
        frame = bytearray()
        encode(message, frame)
        self._transport.write(bytes(frame))
        return True

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


async def connect(path: Path, on_message: Callable[[EngineToApi], None]) -> EngineLink:
    """Return a connection to the engine that listens on `path`. Raises OSError while none does."""
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(lambda: EngineLink(on_message), str(path))
    return link
