"""A whole generation as one response, for requests that do not stream. Must not know: sockets, events."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.api.chunks import ChunkShape
from server.api.generation import Generation
from server.api.logprobs import chat_logprobs, text_logprobs
from server.protocol.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    TextChoice,
    TextCompletion,
    Usage,
)
from server.text.pipeline import OutputToken


@dataclass(slots=True)
class Collected:
    """One choice, complete."""

    texts: list[str] = field(default_factory=list[str])
    tokens: list[OutputToken] = field(default_factory=list[OutputToken])
    token_ids: list[int] = field(default_factory=list[int])
    finish: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


async def collect(generation: Generation) -> list[Collected]:
    """Return all choices, in order, once all have ended. Raises as `Generation.deltas` does."""
    job = generation.job
    choices = [Collected() for _ in range(len(job.submits) * job.n)]
    while (deltas := await generation.deltas()) is not None:
        for delta in deltas:
            choice = choices[delta.index]
            choice.texts.append(delta.text)
            choice.tokens += delta.tokens
            choice.token_ids += delta.token_ids
            choice.finish = delta.finish or choice.finish
    return choices


def chat_completion(shape: ChunkShape, choices: list[Collected], usage: Usage) -> ChatCompletion:
    """Return the response of /v1/chat/completions."""
    return ChatCompletion(
        id=shape.id,
        object="chat.completion",
        created=shape.created,
        model=shape.model,
        choices=[
            ChatChoice(
                index=index,
                message=AssistantMessage("assistant", choice.text),
                logprobs=chat_logprobs(choice.tokens) if shape.logprobs else None,
                finish_reason=choice.finish,
                token_ids=choice.token_ids if shape.token_ids else None,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage,
        prompt_token_ids=list(shape.prompts[0]) if shape.token_ids else None,
    )


def text_completion(shape: ChunkShape, choices: list[Collected], usage: Usage) -> TextCompletion:
    """Return the response of /v1/completions."""
    n = len(choices) // len(shape.prompts)
    return TextCompletion(
        id=shape.id,
        object="text_completion",
        created=shape.created,
        model=shape.model,
        choices=[
            TextChoice(
                index=index,
                text=choice.text,
                logprobs=text_logprobs(choice.tokens) if shape.logprobs else None,
                finish_reason=choice.finish,
                token_ids=choice.token_ids if shape.token_ids else None,
                prompt_token_ids=list(shape.prompts[index // n]) if shape.token_ids else None,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage,
    )
