"""Where pip would fetch a wheel from on this machine: its configured index, certificates and proxy.

Asks pip itself, so environment, configuration files and defaults count as they do for `pip install`. Must not know:
what the wheel is for.
"""

from __future__ import annotations

import ast
import re
import ssl
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import urldefrag, urljoin, urlsplit

import httpx
import msgspec

_PIP_WITHIN_S = 60
_SECTIONS = (":env:", "download", "global")  # the first that has a setting counts
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_TIMEOUT = httpx.Timeout(30.0, connect=15.0)


class IndexFault(Exception):
    """The index cannot be asked, or has no such file; the message says why."""


@dataclass(frozen=True, slots=True)
class PipSettings:
    """What pip is configured for. Index URLs may hold credentials, so they are never shown."""

    index_urls: tuple[str, ...]
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None

    def client(self) -> httpx.Client:
        """Return an HTTP client that reaches the index as pip would. Raises IndexFault for unusable certificates."""
        try:
            context = ssl.create_default_context()
            if self.cert is not None:
                context.load_verify_locations(cafile=self.cert)
            if self.client_cert is not None:
                context.load_cert_chain(self.client_cert)
        except OSError as error:
            raise IndexFault(f"the certificates that pip is configured for cannot be used: {error}") from error
        return httpx.Client(verify=context, proxy=self.proxy, timeout=_TIMEOUT, follow_redirects=True)


def pip_settings() -> PipSettings:
    """Return pip's configuration. Raises IndexFault where this Python has no pip."""
    held = _configured(_pip("config", "list"))
    main = held.get("index-url") or _default_index(_pip("download", "--help"))
    urls = [main, *held.get("extra-index-url", "").split()]
    return PipSettings(
        index_urls=tuple(dict.fromkeys(url for url in urls if url and urlsplit(url).scheme in {"http", "https"})),
        cert=held.get("cert"),
        client_cert=held.get("client-cert"),
        proxy=held.get("proxy"),
    )


def find_wheel(client: httpx.Client, index_urls: tuple[str, ...], package: str, wheel: str) -> str:
    """Return the URL of a wheel by the simple repository API (PEP 503, PEP 691). Raises IndexFault."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    faults: list[str] = []
    for index in index_urls:
        page = f"{index.rstrip('/')}/{name}/"
        try:
            answer = client.get(page, headers={"Accept": _ACCEPT})
        except httpx.HTTPError as error:
            faults.append(f"no answer ({type(error).__name__})")
            continue
        if answer.status_code != 200:
            faults.append(f"status {answer.status_code}")
        elif (url := _links(answer).get(wheel)) is not None:
            return url
        else:
            faults.append(f"no file {wheel}")
    raise IndexFault("; ".join(faults) or "pip is configured for no index over HTTP")


class _File(msgspec.Struct):
    """A file of a project, as PEP 691 says it."""

    filename: str
    url: str


class _Project(msgspec.Struct):
    """A project's page, as PEP 691 says it."""

    files: list[_File] = []


def _links(answer: httpx.Response) -> Mapping[str, str]:
    """Return file name -> absolute URL of a project's page, JSON or HTML."""
    base = str(answer.url)
    if "json" in answer.headers.get("content-type", ""):
        try:
            files = msgspec.json.decode(answer.content, type=_Project).files
        except msgspec.DecodeError:
            return {}
        return {file.filename: urljoin(base, file.url) for file in files}
    page = _Page()
    page.feed(answer.text)
    return {urlsplit(link).path.rpartition("/")[2]: urldefrag(urljoin(base, link)).url for link in page.links}


class _Page(HTMLParser):
    """Collects where the anchors of a page lead."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PIP_WITHIN_S)
    except subprocess.TimeoutExpired:
        raise IndexFault(f"pip does not answer within {_PIP_WITHIN_S} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise IndexFault(f"pip cannot be asked for its index: {last}")
    return done.stdout


def _configured(listing: str) -> dict[str, str]:
    """Return the settings that `pip config list` prints, one `section.name='value'` a line."""
    found: dict[str, str] = {}
    for section in reversed(_SECTIONS):
        for name, value in re.findall(rf"^{re.escape(section)}\.([a-z-]+)=(.+)$", listing, re.MULTILINE):
            found[name] = str(ast.literal_eval(value))
    return found


def _default_index(help_text: str) -> str | None:
    """Return the index that pip's help names as the default: it is written nowhere else that is public."""
    match = re.search(r"--index-url .*?\(default\s+(https?://\S+?)\)", help_text, re.DOTALL)
    return match[1] if match else None
