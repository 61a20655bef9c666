"""The requests in flight on the API's side: what came for each, and who waits for it. Must not know: sockets."""

from __future__ import annotations

import asyncio
from collections import deque

from server.engine.messages import Failed, Rejected, Submit, Tokens

Reply = Tokens | Rejected | Failed


class Stream:
    """Replies to one request, in order. Ends after the last choice's end, a rejection or a failure."""

    def __init__(self, n_choices: int) -> None:
        self._left = n_choices
        self._replies: deque[Reply] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing more will come; what has come may still wait to be taken."""
        return self._left <= 0

    def push(self, reply: Reply) -> None:
        """Add a reply and wake who waits."""
        if isinstance(reply, Tokens):
            self._left -= reply.finish is not None
        else:
            self._left = 0
        self._replies.append(reply)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Reply | None:
        """Return the next reply, None when there is none left to come."""
        while not self._replies:
            if self.complete:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._replies.popleft()


class Streams:
    """All requests in flight, by id."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        """How many are in flight."""
        return len(self._streams)

    def open(self, request: Submit) -> Stream:
        """Return a new stream. Raises ValueError when the id is in use."""
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._streams[request.request_id] = Stream(request.n)
        return self._streams[request.request_id]

    def close(self, request_id: str) -> None:
        """Forget a stream; what still comes for it is dropped."""
        self._streams.pop(request_id, None)

    def deliver(self, reply: Reply) -> None:
        """Hand a reply to its stream; one for a request that is gone is dropped."""
        stream = self._streams.get(reply.request_id)
        if stream is not None:
            stream.push(reply)

    def fail_all(self, message: str, reason: str = "fault") -> None:
        """End every stream with a failure, `reason` as in Failed."""
        for request_id, stream in tuple(self._streams.items()):
            if not stream.complete:
                stream.push(Failed(request_id, message, reason))
