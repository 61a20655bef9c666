"""Token ids to text, one at a time, never cutting a character in two.

Must not know: stop strings, requests, HTTP.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenSpelling(Protocol):
    """What decoding needs to know of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are left out when special tokens are skipped."""
        ...

    @property
    def strip_leading_space(self) -> bool:
        """Whether the text of a sequence begins with a space that is not part of it."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of a token."""
        ...


class Detokenizer:
    """The text of one growing sequence. All texts returned, joined, equal `Tokenizer.decode` of all tokens pushed.

    continues: the text goes on after a prompt instead of starting a sequence, so that a leading space is part of it.
    """

    def __init__(self, tokenizer: TokenSpelling, *, skip_special: bool, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strip_leading_space and not continues

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes; maybe none."""
        if token_id in self._skipped:
            return ""
        return self._shown(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD where bytes of an unfinished character wait. Starts anew."""
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
