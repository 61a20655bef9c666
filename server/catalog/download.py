"""One large file over HTTP: resumed where it broke off, retried, and trusted only once its checksum is right.

Must not know: what the file is, where its URL came from.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx

_ATTEMPTS = 4

Told = Callable[[int, int], None]  # bytes done, bytes in all


class DownloadFault(Exception):
    """The file could not be fetched; what came is kept, so that the next attempt goes on from there."""


class WrongContent(Exception):
    """The file is not what it should be: its checksum differs."""


def download(client: httpx.Client, url: str, part: Path, n_bytes: int, told: Told) -> None:
    """Bring `part` to the whole file of `n_bytes`, starting from what it holds. Raises DownloadFault.

    A connection that breaks is retried from where it broke; only attempts without any progress count.
    """
    failures = 0
    while (held := _size(part)) != n_bytes:
        if held > n_bytes:
            part.unlink()
        try:
            _attempt(client, url, part, n_bytes, told)
        except httpx.HTTPError as error:
            fault = DownloadFault(f"{type(error).__name__} after {_size(part)} of {n_bytes} bytes")
            failures = 0 if _size(part) > held else failures + 1
            if failures == _ATTEMPTS:
                raise fault from error
    told(n_bytes, n_bytes)


def _attempt(client: httpx.Client, url: str, part: Path, n_bytes: int, told: Told) -> None:
    held = _size(part)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={held}-"} if held else {})
    with client.stream("GET", url, headers=headers) as answer:
        resumed = answer.headers.get("content-range", "").startswith(f"bytes {held}-")
        if answer.status_code not in {200, 206} or (answer.status_code == 206 and not resumed):
            raise DownloadFault(f"status {answer.status_code} after {held} of {n_bytes} bytes")
        with part.open("ab" if resumed else "wb") as file:
            for chunk in answer.iter_raw():  # as it comes: what was received before a break is kept
                file.write(chunk)
                told(file.tell(), n_bytes)
                if file.tell() > n_bytes:
                    raise WrongContent(f"the file is longer than the {n_bytes} bytes that it should have")


def check_sha256(path: Path, expected: str) -> None:
    """Raise WrongContent unless the file has this checksum."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise WrongContent(f"its sha256 is {found}, expected {expected}")


def check_space(directory: Path, n_bytes: int) -> None:
    """Raise OSError, saying what is missing, unless the disk under `directory` has room for `n_bytes`."""
    free = shutil.disk_usage(directory).free
    if free < n_bytes:
        raise OSError(f"{n_bytes / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
