"""Text to token ids and back: the one tokenizer that the API process uses, whatever files it came from.

Must not know: HTTP, templates, requests. Safe to use from several threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from server.errors import ModelError
from server.text.gguf_vocabulary import load_gguf_vocabulary
from server.text.guarded import GuardedEncoder
from server.text.hf_vocabulary import load_hf_vocabulary
from server.text.prompt_pieces import PromptPiece, PromptPieces
from server.text.vocabulary import Vocabulary


def load_tokenizer(model_path: Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file or a Hugging Face directory. Raises ModelError, naming file and key."""
    if model_path.is_dir():
        return Tokenizer(load_hf_vocabulary(model_path))
    if model_path.is_file():
        return Tokenizer(load_gguf_vocabulary(model_path))
    raise ModelError(f"{model_path}: no such file or directory, so no tokenizer can be read from it")


NORMALISED = 4  # how many times shorter a text may get before it is encoded: NFC makes three bytes of nine


class Tokenizer:
    """Encodes, decodes, and knows what each id is. Immutable."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._encoder = GuardedEncoder(vocabulary.backend, vocabulary.control, byte_level=vocabulary.byte_level)
        unchanged = vocabulary.byte_level and vocabulary.backend.normalizer is None
        self._most_token_bytes = max(map(len, vocabulary.token_bytes)) * (1 if unchanged else NORMALISED)

    # ------------------------------------------------------------------ encoding

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the ids of `text`.

        add_special: put what the model expects around a prompt (bos, for most) before and after it.
        parse_special: text that spells a control token becomes that token; False guarantees ordinary tokens for it.
        """
        return self.encode_pieces(
            PromptPieces((PromptPiece(text, literal=not parse_special),)), add_special=add_special
        )

    def encode_pieces(self, prompt: PromptPieces, *, add_special: bool = False) -> list[int]:
        """Return the ids of a rendered prompt, with control tokens only where the template itself wrote them."""
        ids = self._encoder.encode(prompt)
        return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix] if add_special else ids

    def most_bytes(self, n_tokens: int) -> int:
        """Return a length in UTF-8 beyond which no text can become as few as `n_tokens` tokens."""
        return n_tokens * self._most_token_bytes

    # ------------------------------------------------------------------ decoding

    def decode(self, ids: Iterable[int], *, skip_special: bool) -> str:
        """Return the text of `ids` as of a sequence's start; bytes that are no UTF-8 become U+FFFD.

        Raises ValueError for ids outside the vocabulary.
        """
        raw = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self._vocabulary.special_ids))
        text = raw.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._vocabulary.strip_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of a token; empty for ids that only pad the vocabulary. ValueError outside it."""
        if not 0 <= token_id < len(self._vocabulary.token_bytes):
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        return self._vocabulary.token_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """Return a token as shown in logprobs; a part of a character shows as U+FFFD, `token_bytes` is exact."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    # ------------------------------------------------------------------ facts

    @property
    def vocab_size(self) -> int:
        """Number of ids, those included that pad the vocabulary up to the model's rows."""
        return len(self._vocabulary.token_bytes)

    @property
    def bos_id(self) -> int | None:
        """Id that begins a sequence, if the model has one."""
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids any of which ends a generation; the first is the tokenizer's own end of sequence."""
        return self._vocabulary.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are left out of a text when special tokens are skipped."""
        return self._vocabulary.special_ids

    @property
    def control(self) -> Mapping[str, int]:
        """Text -> id of the tokens that text from a user never becomes."""
        return self._vocabulary.control

    @property
    def strip_leading_space(self) -> bool:
        """Whether the text of a sequence begins with a space that is not part of it (SentencePiece)."""
        return self._vocabulary.strip_leading_space

    @property
    def texts(self) -> Mapping[str, str]:
        """bos_token, eos_token, unk_token and pad_token as text, those that the model has."""
        return self._vocabulary.texts

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, if its files hold one."""
        return self._vocabulary.chat_template

    @property
    def tool_template(self) -> str | None:
        """The chat template for requests with tools, if the model's files hold a separate one."""
        return self._vocabulary.tool_template
