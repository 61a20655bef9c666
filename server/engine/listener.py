"""The engine's end of the socket: several connections, read and written without blocking by the loop's one thread.

Knows frames and connections. Must not know: what messages mean.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from pathlib import Path

from server.engine.messages import ApiToEngine, EngineToApi
from server.engine.wire import FrameError, FrameReader, encode, engine_reader

logger = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
MAX_UNSENT_BYTES = 64 * 1024 * 1024  # then the other side is taken for dead

Received = tuple[int, ApiToEngine | None]  # connection, message; None: the connection is gone


class _Connection:
    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        self.reader: FrameReader[ApiToEngine] = engine_reader()
        self.unsent = bytearray()
        self.watched_for_writing = False


class Listener:
    """A unix socket that only this user can open. Used by one thread."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)  # of an engine that died
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(mask)
        self._socket.listen()
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._connections: dict[int, _Connection] = {}
        self._accepted = 0
        self._lost: list[int] = []
        self.greeting: EngineToApi | None = None  # what a new connection is told first

    @property
    def n_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def receive(self, timeout_s: float) -> list[Received]:
        """Return what has arrived; wait up to `timeout_s` for something to happen if nothing has."""
        received: list[Received] = []
        for key, events in self._selector.select(0.0 if self._lost else timeout_s):
            connection: _Connection | None = key.data
            if connection is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            if events & selectors.EVENT_READ:
                received += self._read(connection)
        received += [(number, None) for number in self._lost]
        self._lost.clear()
        return received

    def send(self, number: int, message: EngineToApi) -> None:
        """Queue a message for `flush`. One for a connection that is gone is dropped."""
        connection = self._connections.get(number)
        if connection is not None:
            encode(message, connection.unsent)

    def broadcast(self, message: EngineToApi) -> None:
        """Queue a message for every connection."""
        for connection in self._connections.values():
            encode(message, connection.unsent)

    def flush(self) -> None:
        """Send what is queued, as far as the other sides take it now; the rest goes during `receive`."""
        for connection in tuple(self._connections.values()):
            if len(connection.unsent) > MAX_UNSENT_BYTES:
                self._drop(connection, f"{len(connection.unsent)} bytes were not taken")
            elif connection.unsent and not connection.watched_for_writing:
                self._send(connection)

    def close(self, within_s: float) -> None:
        """Send what is queued, waiting up to `within_s` for each connection, and close all."""
        for connection in tuple(self._connections.values()):
            try:
                connection.sock.settimeout(within_s)
                connection.sock.sendall(connection.unsent)
            except OSError as error:
                logger.debug("last frames were not sent", extra={"error": str(error)})
            self._drop(connection, "closed")
        self._selector.close()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:  # it hung up before it was accepted
            return
        sock.setblocking(False)
        self._accepted += 1
        connection = _Connection(self._accepted, sock)
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        if self.greeting is not None:
            encode(self.greeting, connection.unsent)

    def _read(self, connection: _Connection) -> list[Received]:
        """Return the messages that have come in whole; drop a connection that ended or sends what cannot be read."""
        try:
            data = connection.sock.recv(READ_BYTES)
            messages = connection.reader.feed(data)
        except BlockingIOError:
            return []
        except OSError as error:
            self._drop(connection, str(error))
            return []
        except FrameError as error:
            logger.warning("connection closed", extra={"connection": connection.number, "error": str(error)})
            self._drop(connection, str(error))
            return []
        if not data:
            self._drop(connection, "hung up")
        return [(connection.number, message) for message in messages]

    def _send(self, connection: _Connection) -> None:
        try:
            sent = connection.sock.send(connection.unsent) if connection.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._drop(connection, str(error))
            return
        del connection.unsent[:sent]
        if bool(connection.unsent) != connection.watched_for_writing:
            connection.watched_for_writing = bool(connection.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection, why: str) -> None:
        """Close a connection; `receive` will say so."""
        if self._connections.pop(connection.number, None) is None:
            return
        logger.debug("connection is gone", extra={"connection": connection.number, "why": why})
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._lost.append(connection.number)
