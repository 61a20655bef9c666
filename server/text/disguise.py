"""Takes strings of users through a chat template such that they cannot become control tokens, however it treats them.

The characters that control tokens are spelled with are replaced, one for one, by private-use characters that occur
nowhere in the request; after rendering they are turned back and mark their place as data. So templates may trim, slice,
join, compare or JSON-encode what users wrote. Texts that the template itself looks for (such as `</think>`) stay as
they are, unless they could be part of a control token. Must not know: templates' syntax, tokens' ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import cast

from server.text.prompt_pieces import PromptPiece, PromptPieces

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))  # Unicode, chapter 23.5


class Disguise:
    """The stand-ins for one model: which characters need one, and which texts its template looks for."""

    def __init__(self, control: Collection[str], looked_for: Iterable[str], template: str) -> None:
        self._control = control
        self._template = template
        telling = {c for token in control for c in token if not (c.isalnum() or c.isspace() or c == "_")}
        self._telling = sorted(telling | {token[0] for token in control} | {token[-1] for token in control})
        kept = [text for text in set(looked_for) if self._may_stay(text)]
        self._kept = re.compile("|".join(map(re.escape, sorted(kept, key=len, reverse=True)))) if kept else None

    def _may_stay(self, text: str) -> bool:
        """Whether `text` needs to be kept, being spelled with telling characters, and neither holds nor is a part of a
        control token.
        """
        telling = len(text) > 1 and not set(text).isdisjoint(self._telling)
        return telling and not any(token in text or text in token for token in self._control)

    def put_on(self, value: object) -> Worn:
        """Return `value` (strings, lists, dicts) in disguise. ValueError if no private-use character is left to use."""
        used = set[str]().union(*_strings(value))
        telling = [character for character in self._telling if character in used]
        used |= set(self._template)
        free = (c for c in map(chr, chain(*_PRIVATE_USE)) if c not in used)
        try:
            stand_ins = {character: next(free) for character in telling}
            return Worn(self._control, self._kept, stand_ins, value, next(free))
        except StopIteration:
            raise ValueError("the messages use up all private-use characters of Unicode") from None


class Worn:
    """One request in disguise. `mark` is a further character that occurs nowhere in it, to be used as a marker."""

    def __init__(
        self,
        control: Collection[str],
        kept: re.Pattern[str] | None,
        stand_ins: Mapping[str, str],
        value: object,
        mark: str,
    ) -> None:
        self._control = control
        self._kept = kept
        self._hide = str.maketrans(dict(stand_ins))
        self._show = {stand_in: character for character, stand_in in stand_ins.items()}
        self._show |= {json.dumps(stand_in)[1:-1]: character for stand_in, character in self._show.items()}
        self._hidden = re.compile("(?:" + "|".join(map(re.escape, self._show)) + ")+") if stand_ins else None
        self._one_hidden = re.compile("|".join(map(re.escape, self._show)))
        self.value = self._disguised(value)
        self.mark = mark

    def _disguised(self, value: object) -> object:
        if isinstance(value, str):
            return self._disguised_text(value)
        if isinstance(value, dict):
            pairs = cast("dict[object, object]", value).items()
            return {self._disguised(key): self._disguised(item) for key, item in pairs}
        if isinstance(value, list | tuple):
            return [self._disguised(item) for item in cast("list[object]", value)]
        return value

    def _disguised_text(self, text: str) -> str:
        if self._kept is not None and self._hide and self._kept.search(text):
            cuts = list(chain(*(match.span() for match in self._kept.finditer(text))))
            bounds = [0, *cuts, len(text)]
            runs = (text[start:stop] for start, stop in pairwise(bounds))
            mixed = "".join(run if i % 2 else run.translate(self._hide) for i, run in enumerate(runs))
            if not any(token in mixed for token in self._control):
                return mixed
        return text.translate(self._hide)

    def take_off(self, rendered: str) -> PromptPieces:
        """Return the rendered prompt with what was disguised as literal pieces."""
        if self._hidden is None:
            return PromptPieces((PromptPiece(rendered, literal=False),) if rendered else ())
        pieces: list[PromptPiece] = []
        at = 0
        for match in self._hidden.finditer(rendered):
            if match.start() > at:
                pieces.append(PromptPiece(rendered[at : match.start()], literal=False))
            shown = self._one_hidden.sub(lambda one: self._show[one[0]], match[0])
            pieces.append(PromptPiece(shown, literal=True))
            at = match.end()
        if at < len(rendered):
            pieces.append(PromptPiece(rendered[at:], literal=False))
        return PromptPieces(tuple(pieces))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from _strings(item)
