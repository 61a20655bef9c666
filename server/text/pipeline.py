"""One choice's output: the engine's tokens in, text that is safe to send out, with the tokens it stands for.

Joins detokenizer, stop strings and logprobs, so that text and logprob entries of a choice end at the same place.
Must not know: HTTP, OpenAI's JSON, the engine's connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from server.text.detokenizer import Detokenizer, TokenSpelling
from server.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most probable tokens at a place."""

    token_id: int
    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token whose text has been sent. `logprob` None: none was asked for."""

    token_id: int
    text: str  # the token alone; part of a character shows as U+FFFD
    raw: bytes  # exact
    offset: int  # where its text begins in the choice's text, in characters
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new. `finish` is set exactly once, on the last delta of a choice."""

    text: str
    tokens: tuple[OutputToken, ...]
    finish: str | None = None  # as the engine said it; "stop" when a stop string was found
    stop: str | int | None = None  # what ended the text: the stop string, or the id of the stop token


class Logprobs(Protocol):
    """Logprobs of one generated token, `server.engine.messages.TokenLogprobs` for one."""

    @property
    def logprob(self) -> float:
        """Natural logarithm of the token's probability."""
        ...

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The most probable tokens, (id, logprob), falling."""
        ...


class OutputTokenizer(TokenSpelling, Protocol):
    """What this module needs of a tokenizer."""

    def token_text(self, token_id: int) -> str:
        """Return a token's text by itself."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A token whose text is not known to be safe yet, and the text's length after it.

    A token without text of its own (a part of a character, a special token) waits for text after it: where that is cut
    off by a stop string, so is the token.
    """

    token: OutputToken
    end: int

    def is_sent(self, n_sent: int) -> bool:
        return self.end <= n_sent and self.token.offset < n_sent


class OutputStream:
    """The output of one choice, from its first token to its finish.

    stops: stop strings. include_stop: what ended the text, string or token, is part of it. skip_special: special tokens
    give no text. continues: see Detokenizer. min_tokens: so many tokens are output whatever stop strings they spell.
    """

    def __init__(
        self,
        tokenizer: OutputTokenizer,
        *,
        stops: Iterable[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        continues: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._min_tokens = min_tokens
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special, continues=continues)
        self._matcher = StopMatcher(stops, include=include_stop)
        self._include_stop = include_stop
        self._waiting: deque[_Waiting] = deque()
        self._decoded = 0  # characters
        self._sent = 0  # characters
        self._finish: str | None = None
        self.n_tokens = 0  # generated so far, a stop token and those without text included; none after a stop string

    @property
    def finished(self) -> bool:
        """Whether the last delta was given; later tokens are ignored."""
        return self._finish is not None

    def push(self, tokens: Sequence[int], logprobs: Sequence[Logprobs] = (), finish: str | None = None) -> OutputDelta:
        """Take what the engine sent for this choice; return what can be sent on.

        logprobs: empty or one for each token. When a stop string ends the text, the delta has `finish` "stop" though
        the engine has not finished: the caller then cancels the choice.
        """
        if self.finished:
            return OutputDelta("", ())
        texts: list[str] = []
        for i, token_id in enumerate(tokens):
            self.n_tokens += 1
            if finish == "stop" and i == len(tokens) - 1 and not self._include_stop:
                break  # the stop token itself is no output
            text = self._detokenizer.push(token_id)
            if (stop := self._take(token_id, text, logprobs[i] if logprobs else None, texts)) is not None:
                return self._ended("stop", stop, texts)
        if finish is None:
            return self._delta(texts)
        if (stop := self._matched(self._detokenizer.flush(), texts)) is not None:
            return self._ended("stop", stop, texts)
        texts.append(self._matcher.flush())
        return self._ended(finish, tokens[-1] if finish == "stop" and tokens else None, texts)

    def _take(self, token_id: int, text: str, logprobs: Logprobs | None, texts: list[str]) -> str | None:
        """Add one token; return the stop string that its text completes."""
        token = OutputToken(
            token_id=token_id,
            text=self._tokenizer.token_text(token_id),
            raw=self._tokenizer.token_bytes(token_id),
            offset=self._decoded,
            logprob=None if logprobs is None else logprobs.logprob,
            top=() if logprobs is None else tuple(map(self._top, logprobs.top)),
        )
        self._decoded += len(text)
        self._waiting.append(_Waiting(token, self._decoded))
        return self._matched(text, texts)

    def _matched(self, text: str, texts: list[str]) -> str | None:
        if self.n_tokens <= self._min_tokens:
            texts.append(text)
            return None
        result = self._matcher.push(text)
        texts.append(result.text)
        return result.stopped

    def _top(self, entry: tuple[int, float]) -> TopLogprob:
        token_id, logprob = entry
        return TopLogprob(
            token_id, self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id), logprob
        )

    def _delta(self, texts: list[str]) -> OutputDelta:
        """Return the text that is safe, and the tokens all of whose text was sent with it or before."""
        text = "".join(texts)
        self._sent += len(text)
        tokens: list[OutputToken] = []
        while self._waiting and self._waiting[0].is_sent(self._sent):
            tokens.append(self._waiting.popleft().token)
        return OutputDelta(text, tuple(tokens))

    def _ended(self, finish: str, stop: str | int | None, texts: list[str]) -> OutputDelta:
        """Return the last delta: of the tokens that wait, those count which begin before the end of the text."""
        self._finish = finish
        delta = self._delta(texts)
        cut_by_string = isinstance(stop, str)
        rest = (item.token for item in self._waiting if not cut_by_string or item.token.offset < self._sent)
        return OutputDelta(delta.text, (*delta.tokens, *rest), finish, stop)
