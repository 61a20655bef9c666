"""A Hugging Face directory's safetensors as a checkpoint: one file, or shards under an index.

Bounds inside a file are the safetensors library's business; pickled weights are never read. Must not know: names,
models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from megakernel_runtime.models.fields import ConfigError
from megakernel_runtime.models.read_config import read_json
from megakernel_runtime.weights.checkpoint import Entry
from megakernel_runtime.weights.errors import WeightError

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _View(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _Opened(Protocol):
    """What safetensors' own, untyped `safe_open` gives."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _View: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class SafetensorsCheckpoint:
    """All safetensors files of one directory, open."""

    def __init__(self, path: Path) -> None:
        """Open the files and check them against the index. Raises WeightError."""
        self.path = path
        self._files: dict[Path, _Opened] = {}
        self.entries: dict[str, Entry] = {}
        if (path / _INDEX).exists():
            for shard, names in _read_index(path / _INDEX).items():
                self._check_shard(shard, self._open(shard), names)
        elif (path / _SINGLE).exists():
            self._open(path / _SINGLE)
        else:
            hint = "; pickled weights are not read, convert them to safetensors" if any(path.glob("*.bin")) else ""
            raise WeightError(f"{path}: neither {_SINGLE} nor {_INDEX}{hint}")

    def _open(self, file: Path) -> set[str]:
        """Open one file, add its tensors to the entries, return their names."""
        try:
            opened = cast("_Opened", safe_open(file, framework="pt"))
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{file}: cannot be read as safetensors: {error}") from error
        for name, view in slices.items():
            shape, kind = tuple(view.get_shape()), view.get_dtype()
            if kind not in _ELEMENT_BYTES:
                raise WeightError(f"{file}: tensor '{name}' is {kind}; supported: {', '.join(_ELEMENT_BYTES)}")
            if name in self.entries:
                raise WeightError(f"{file}: tensor '{name}' is also in {self.entries[name].file}")
            self.entries[name] = Entry(file, shape, torch.Size(shape).numel() * _ELEMENT_BYTES[kind])
        self._files[file] = opened
        return set(slices)

    @staticmethod
    def _check_shard(shard: Path, held: set[str], indexed: set[str]) -> None:
        for name in sorted(indexed - held):
            raise WeightError(f"{shard}: tensor '{name}' is missing, though {_INDEX} says it is there")
        for name in sorted(held - indexed):
            raise WeightError(f"{shard}: tensor '{name}' is not in {_INDEX}")

    def read(self, name: str) -> torch.Tensor:
        """Return the stored tensor, a view of the mapped file."""
        file = self.entries[name].file
        try:
            return self._files[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise WeightError(f"{file}: tensor '{name}' cannot be read: {error}") from error


def _read_index(index: Path) -> dict[Path, set[str]]:
    """Return shard -> its tensors. Shards must be files beside the index."""
    try:
        table = read_json(index).get("weight_map")
    except ConfigError as error:
        raise WeightError(str(error)) from error
    if not isinstance(table, dict) or not table:
        raise WeightError(f"{index}: no weight_map of tensor names to files")
    shards: dict[Path, set[str]] = {}
    for name, file in cast("dict[str, object]", table).items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightError(f"{index}: tensor '{name}' is said to be in {file!r}, which is no file name")
        shards.setdefault(index.parent / file, set()).add(name)
    for shard, names in shards.items():
        if not shard.exists():
            raise WeightError(f"{shard}: missing, though {index.name} says it holds tensor '{min(names)}'")
    return shards
