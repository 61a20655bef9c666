"""Encoding that keeps data and control apart: control tokens are recognised in trusted runs of a prompt only.

All text goes through one call of the tokenizer, in which the recognised control tokens stand as unguessable guards.
So borders between runs change nothing: text without control tokens in its data gives the ordinary ids.
Must not know: where runs come from.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from server.errors import ModelError
from server.text.prompt_pieces import PromptPiece, PromptPieces
from server.text.vocabulary import CODE_POINT_OF_BYTE, add_tokens


class GuardedEncoder:
    """Encodes prompts with the model, normaliser and pre-tokeniser of `backend`. Safe to call from several threads."""

    def __init__(self, backend: Backend, control: Mapping[str, int], *, byte_level: bool) -> None:
        self._byte_level = byte_level
        self._control = control
        self._control_ids = frozenset(control.values())
        added = backend.get_added_tokens_decoder()
        self._plain = _without_control(backend, added, control)
        flags = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        self._flags = {text: flags.get(text, (False, False)) for text in control}
        self._guards = {flag: secrets.token_hex(16) for flag in sorted(set(self._flags.values()))}
        add_tokens(
            self._plain,
            [
                AddedToken(guard, lstrip=lstrip, rstrip=rstrip, normalized=False)
                for (lstrip, rstrip), guard in self._guards.items()
            ],
        )
        self._guard_ids = {self._plain.token_to_id(guard) for guard in self._guards.values()}
        longest_first = sorted(control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if control else None

    def encode(self, prompt: PromptPieces) -> list[int]:
        """Return the ids of a prompt; nothing is added before or after it."""
        control: list[int] = []
        text = "".join(piece.text if piece.literal else self._guarded(piece, control) for piece in prompt.pieces)
        ids = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._control_ids.isdisjoint(ids):
            ids = self._spelled(ids)
        if not control:
            return ids
        following = iter(control)
        return [next(following) if token in self._guard_ids else token for token in ids]

    def _guarded(self, piece: PromptPiece, control: list[int]) -> str:
        """Return the text with guards for control tokens, whose ids are appended to `control`."""

        def guard(match: re.Match[str]) -> str:
            control.append(self._control[match[0]])
            return self._guards[self._flags[match[0]]]

        return self._pattern.sub(guard, piece.text) if self._pattern else piece.text

    def _spelled(self, ids: list[int]) -> list[int]:
        """Return `ids` where control tokens that merging made of ordinary text are spelled character by character."""
        text_of = {number: text for text, number in self._control.items()}
        out: list[int] = []
        for token in ids:
            if token not in self._control_ids:
                out.append(token)
                continue
            for character in text_of[token]:
                out.extend(part.id for part in self._plain.model.tokenize(self._in_alphabet(character)))
        return out

    def _in_alphabet(self, character: str) -> str:
        return character.encode().decode("latin-1").translate(CODE_POINT_OF_BYTE) if self._byte_level else character


def _without_control(backend: Backend, added: Mapping[int, AddedToken], control: Mapping[str, int]) -> Backend:
    """Return a tokenizer over the same model which takes the control tokens in a text for ordinary text."""
    plain = Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    tokens = [
        AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.content in control,
        )
        for _, token in sorted(added.items())
    ]
    add_tokens(plain, tokens)
    plain.encode_special_tokens = True
    for number, token in added.items():
        if plain.token_to_id(token.content) != number:
            raise ModelError(
                f"the tokenizer's added token {token.content!r} has id {number}, which does not follow the ids before "
                f"it; supported: added tokens without gaps"
            )
    return plain
