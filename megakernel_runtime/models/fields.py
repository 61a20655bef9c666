"""Typed, checked access to foreign key-value pairs (config.json, GGUF metadata).

Knows types and limits of values, and the file to blame. Must not know: which keys exist or what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from megakernel_runtime.interface import ModelError

MAX_INTEGER = 1 << 31  # no size of a model is larger; keeps a damaged file from asking for the moon


class ConfigError(ModelError):
    """A configuration that cannot be served; the message names file, key, value and what is supported."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The pairs of one file. A key that is absent and one that is null are the same: the default applies."""

    source: str  # what to call the file in messages
    values: Mapping[str, object]

    def error(self, key: str, expected: str) -> ConfigError:
        """Return the error that says what `key` holds and what is supported."""
        value = self.values.get(key)
        held = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return ConfigError(f"{self.source}: '{key}' {held}; supported: {expected}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER) -> int:
        """Return an integer in [low, high]; ConfigError for anything else."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, key: str, *, low: int = 0) -> int | None:
        """Return an integer, or None where the key is absent or null."""
        return None if self.values.get(key) is None else self.integer(key, low=low)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number greater than zero; ConfigError for anything else."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "a finite number greater than 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a boolean, False where the key is absent."""
        value = self.values.get(key)
        if not isinstance(value, bool | None):
            raise self.error(key, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; ConfigError for anything else."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def group(self, key: str) -> Fields:
        """Return the nested object under `key`, empty where it is absent."""
        value = self.values.get(key)
        if value is None:
            return Fields(f"{self.source}: {key}", {})
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(f"{self.source}: {key}", cast("dict[str, object]", value))

    def items(self, key: str) -> tuple[object, ...]:
        """Return the elements of a list, a scalar as its only element, nothing where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        return tuple(cast("list[object]", value)) if isinstance(value, list) else (value,)

    def only(self, supported: Mapping[str, object]) -> None:
        """Raise ConfigError unless each of these keys is absent or holds the one value that is supported."""
        for key, value in supported.items():
            held = self.values.get(key)
            if held is not None and held != value:
                raise self.error(key, "leaving it out" if value is None else f"{value!r} only")
