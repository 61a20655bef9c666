"""The request of /v1/chat/completions. Must not know: chat templates, tokens, the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from server.protocol.base import RequestModel
from server.protocol.generation import GenerationRequest
from server.protocol.values import Content


class InstructionMessage(RequestModel):
    """What the assistant should be; `developer` is OpenAI's newer name for `system`."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(RequestModel):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class FunctionCall(RequestModel):
    """The function that an earlier answer called."""

    name: str
    arguments: str = Field("", description="JSON text.")


class ToolCall(RequestModel):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(RequestModel):
    """An earlier answer, or the beginning of the next one (continue_final_message)."""

    role: Literal["assistant"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(RequestModel):
    """What a called function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class TemplateFields(RequestModel):
    """How a conversation becomes a prompt."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt with the beginning of an answer; true unless continue_final_message is."
    )
    continue_final_message: bool = Field(False, description="Go on with the last message instead of answering it.")
    add_special_tokens: bool = Field(False, description="Chat templates write what a prompt begins with themselves.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Further variables for the model's chat template."
    )

    @property
    def generation_prompt(self) -> bool:
        """Whether the prompt ends with the beginning of an answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them: no field that was not given."""
        return [message.model_dump(exclude_none=True) for message in self.messages]


class ChatRequest(TemplateFields, GenerationRequest):
    """A conversation to be continued."""

    logprobs: bool = Field(False, description="Give the logprob of each token.")
    top_logprobs: int | None = Field(None, ge=0, description="And those of so many alternatives; needs logprobs.")
