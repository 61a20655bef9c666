"""A small client of the OpenAI chat API for the terminal: streams an answer and measures it as a user feels it.

Knows HTTP and server-sent events from the outside, as any client does. Must not know: this server's inside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.errors import MegakernelError


class ChatError(MegakernelError):
    """The server refused, failed, or cannot be reached; the message is fit to be shown."""


@dataclass(slots=True)
class Answer:
    """One streamed answer while it arrives. Times are seconds on one clock; counts come from the server's usage."""

    started: float = field(default_factory=time.perf_counter)
    first_text: float | None = None
    last_text: float | None = None
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def first_token_seconds(self) -> float | None:
        """Time from the request to the first text; None if there was none."""
        return None if self.first_text is None else self.first_text - self.started

    @property
    def tokens_per_second(self) -> float | None:
        """Rate after the first token; None when too few tokens came to tell."""
        if self.first_text is None or self.last_text is None or self.completion_tokens < 2:
            return None
        seconds = self.last_text - self.first_text
        return (self.completion_tokens - 1) / seconds if seconds > 0 else None


class ChatClient:
    """Talks to one server. Close it when done."""

    def __init__(self, url: str, api_key: str = "", transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(10.0, read=600.0)
        base = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout, transport=transport)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def served_model(self) -> str:
        """Return the first model that the server offers. Raises ChatError."""
        try:
            response = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ChatError(f"no server answers at {self._http.base_url} ({error})") from None
        if response.status_code != 200:
            raise ChatError(_refusal(response.status_code, response.content))
        return str(response.json()["data"][0]["id"])

    def stream(self, answer: Answer, **request: object) -> Generator[str]:
        """Yield the text of the answer to `request` as it comes, filling `answer`. Raises ChatError.

        Closing the generator, or an exception thrown into it, closes the connection: the server stops generating.
        """
        counts = {"include_usage": True, "continuous_usage_stats": True}  # so that a stopped answer is counted too
        body = {**request, "stream": True, "stream_options": counts}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(_refusal(response.status_code, response.read()))
                for event in _events(response.iter_lines()):
                    if text := _absorb(answer, event):
                        yield text
        except httpx.HTTPError as error:
            raise ChatError(f"connection to {self._http.base_url} lost ({error or type(error).__name__})") from None


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each `data:` line up to [DONE]; comments and other fields are skipped. Raises ChatError."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise ChatError(str(event["error"].get("message", event["error"])))
        yield event


def _absorb(answer: Answer, event: dict[str, Any]) -> str:
    """Take over what a chunk says and return its text."""
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if not event.get("choices"):
        return ""
    choice = event["choices"][0]
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    text: str = choice["delta"].get("content") or ""
    if text:
        answer.last_text = time.perf_counter()
        answer.first_text = answer.first_text or answer.last_text
        answer.text += text
    return text


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered HTTP {status}"
