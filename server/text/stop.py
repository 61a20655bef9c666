"""Finds stop strings in a text that arrives in pieces, and never gives away the beginning of one.

Where the text ends is a fact about the text alone, however it was cut: at the first character that completes a stop
string; of several completed there, the longest counts. Must not know: tokens, requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopResult:
    """`text` is safe to send. `stopped` is the stop string that ended the text; after it nothing more comes."""

    text: str
    stopped: str | None = None


@dataclass(slots=True)
class _Node:
    """A state of the automaton (Aho and Corasick, 1975): the longest end of the text that begins a stop string."""

    depth: int
    next: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    fail: _Node | None = None
    match: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """Watches one growing text. include: the stop string itself is part of the text."""

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        self._root = _automaton(tuple(stop for stop in stops if stop))
        self._include = include
        self._node = self._root
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        """Take more text; return what can be sent. Takes time linear in `text`. Nothing comes after a stop."""
        if self._stopped or not text:
            return StopResult("")
        if not self._root.next:
            return StopResult(text)
        node, known = self._node, self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            node = _step(node, character)
            if node.match is not None:
                self._stopped, self._held = True, ""
                return StopResult(known[: end if self._include else end - len(node.match)], node.match)
        self._node = node
        cut = len(known) - node.depth
        self._held = known[cut:]
        return StopResult(known[:cut])

    def flush(self) -> str:
        """Return the text held back: no more comes, so it begins no stop string."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _step(node: _Node, character: str) -> _Node:
    while character not in node.next:
        if node.fail is None:
            return node
        node = node.fail
    return node.next[character]


@lru_cache(maxsize=16)  # the choices of a request share it: once made, it never changes
def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.match = stop
    waiting = deque([root])
    while waiting:
        parent = waiting.popleft()
        for character, node in parent.next.items():
            node.fail = root if parent.fail is None else _step(parent.fail, character)
            node.match = node.match or node.fail.match
            waiting.append(node)
    return root
