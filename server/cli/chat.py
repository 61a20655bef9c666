"""`megakernel chat`: a conversation in the terminal, against a running server or one started for it.

Knows terminals and the chat API. Must not know: this server's inside.
"""

from __future__ import annotations

import importlib
import unicodedata
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from server.cli.client import Answer, ChatClient, ChatError
from server.cli.console import err, out

HELP = """[dim]/system TEXT  set the system prompt      /reset  forget the conversation
/help         show this                  /quit   leave (or Ctrl-D); Ctrl-C stops an answer[/dim]"""


@dataclass(slots=True)
class Conversation:
    """What was said so far, and how answers are asked for."""

    model: str
    system: str
    sampling: dict[str, object]
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def request(self, text: str) -> dict[str, object]:
        """Return the request that asks for the answer to `text` after all that was said."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.turns, {"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, **self.sampling}

    def record(self, text: str, answer: str) -> None:
        """Keep a question and its answer."""
        self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def chat(
    url: Annotated[str, typer.Option(help="Server to talk to. Default: start one for this chat.")] = "",
    model: Annotated[str, typer.Option(help="Model to ask for, or to serve. Default: the server's own.")] = "",
    api_key: Annotated[str, typer.Option(envvar="MEGAKERNEL_API_KEY", help="Key that the server asks for.")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="0: always the likeliest token; 1: as the model has it.")
    ] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
) -> None:
    """Chat in the terminal, with streaming, speed and time to first token."""
    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    sampling: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    with ExitStack() as stack:
        if not url:
            url, api_key = _own_server(stack, model)
            model = ""
        client = ChatClient(url, api_key)
        stack.callback(client.close)
        conversation = Conversation(model or client.served_model(), system, sampling)
        out.print(f"[bold]{conversation.model}[/bold] [dim]at {url}[/dim]\n{HELP}\n")
        converse(client, conversation, out)


def _own_server(stack: ExitStack, model: str) -> tuple[str, str]:
    """Start a server that ends with `stack`; return its URL and key."""
    from server.cli.child import child_server

    with err.status("Starting a server") as status:
        arguments = ("--model", model) if model else ()
        server = stack.enter_context(child_server(arguments, lambda phase: status.update(f"Starting: {phase}")))
    return server.url, server.api_key


def converse(client: ChatClient, conversation: Conversation, console: Console) -> None:
    """Read lines and answer them until /quit or the end of input."""
    with suppress(ImportError):
        importlib.import_module("readline")  # gives input() history and editing where the platform has it
    while True:
        try:
            text = console.input("[bold green]>[/bold green] ").strip()
        except KeyboardInterrupt:
            console.print()
            continue
        except EOFError:
            console.print()
            return
        if text == "/quit":
            return
        if text.startswith("/"):
            console.print(_command(conversation, text))
        elif text:
            _answer(client, conversation, text, console)


def _command(conversation: Conversation, line: str) -> str:
    """Carry out a line that begins with a slash; return what to show."""
    name, _, rest = line.partition(" ")
    if name == "/reset":
        conversation.turns.clear()
        return "[dim]forgotten[/dim]"
    if name == "/system":
        conversation.system = rest.strip()
        return "[dim]system prompt set[/dim]" if conversation.system else "[dim]system prompt removed[/dim]"
    return HELP if name == "/help" else f"[red]no command {escape(name)}[/red]\n{HELP}"


def _answer(client: ChatClient, conversation: Conversation, text: str, console: Console) -> None:
    """Stream the answer to `text`. Ctrl-C stops it and keeps what came; a failed question is not kept."""
    answer = Answer()
    note = ""
    events = client.stream(answer, **conversation.request(text))
    try:
        for piece in events:
            console.out(printable(piece), end="", highlight=False)
            console.file.flush()
    except KeyboardInterrupt:
        note = "stopped"
    except ChatError as error:
        console.print(f"[red]{escape(str(error))}[/red]")
        return
    finally:
        events.close()
    conversation.record(text, answer.text)
    console.print(f"\n[dim]{summary(answer, note)}[/dim]\n")


def printable(text: str) -> str:
    """Return `text` without control characters other than newline and tab: no model moves the user's cursor."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def summary(answer: Answer, note: str) -> str:
    """Return one line on an answer: tokens, tokens per second, time to first token, how it ended if unusual."""
    parts = [f"{answer.completion_tokens} tokens"] if answer.completion_tokens else []
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.first_token_seconds is not None:
        parts.append(f"first token {answer.first_token_seconds * 1000:.0f} ms")
    if answer.finish_reason == "length":
        parts.append("cut at the token limit")
    return " · ".join([*parts, note] if note else parts) or "no text"
