"""A rendered prompt that remembers which of its characters came from a user.

Must not know: templates, token ids.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A run of characters. `literal`: they are data, and never part of a control token whatever they spell."""

    text: str
    literal: bool


@dataclass(frozen=True, slots=True)
class PromptPieces:
    """The runs in order. A control token is recognised only if it lies wholly inside one run that is not literal."""

    pieces: tuple[PromptPiece, ...]

    @property
    def text(self) -> str:
        """The whole prompt as text."""
        return "".join(piece.text for piece in self.pieces)
