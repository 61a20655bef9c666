"""A web server on a free port of this machine that serves bytes, in ranges, and breaks off when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What is served, how, and what was asked for. Change it while it runs."""

    url: str = ""
    pages: dict[str, tuple[bytes, dict[str, str]]] = field(default_factory=dict)  # path -> body, headers
    statuses: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)  # path -> answered instead of a page
    ranges: bool = True  # whether a Range header is honoured
    cuts: list[int] = field(
        default_factory=list
    )  # bytes of the body that each of the next answers sends before it dies
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path and Range header, in order of arrival

    def put(self, path: str, body: bytes, content_type: str = "application/octet-stream", **headers: str) -> str:
        """Serve a page; return its URL."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.pages[path] = (body, {"Content-Type": content_type, **named})
        return self.url + path

    def asked_for(self, path: str) -> list[str | None]:
        """Return the Range headers of all requests for a page."""
        return [wanted for asked, wanted in self.asked if asked == path]


@contextmanager
def serve_site() -> Iterator[Site]:
    """Serve until the block ends."""
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    server.daemon_threads = True
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path, wanted = self.path.partition("?")[0], self.headers.get("Range")
        if with_body:
            self.site.asked.append((path, wanted))
        if path in self.site.statuses:
            status, headers = self.site.statuses[path]
            body = b"{}"
        elif path in self.site.pages:
            body, headers = self.site.pages[path]
            status = 200
            if wanted and self.site.ranges:
                status, body, headers = self._ranged(wanted, body, headers)
        else:
            status, body, headers = 404, b"", {}
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            cut = self.site.cuts.pop(0) if self.site.cuts and len(body) > 1000 else len(body)
            self.wfile.write(body[:cut])  # fewer bytes than announced: the connection then closes

    def _ranged(self, wanted: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        first = int(wanted.removeprefix("bytes=").partition("-")[0])
        if first >= len(body):
            return 416, b"", {"Content-Range": f"bytes */{len(body)}"}
        return 206, body[first:], headers | {"Content-Range": f"bytes {first}-{len(body) - 1}/{len(body)}"}
