"""Fields that clients know and this server cannot honour yet: each is answered with a 400 that names it.

A value that asks for what happens anyway is let through. Must not know: the fields that are honoured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.errors import InvalidRequest
from server.protocol.values import shown


@dataclass(frozen=True, slots=True)
class Refusal:
    """What cannot be had, and the values that do not ask for it (null never does)."""

    what: str
    neutral: tuple[object, ...] = ()


_TOOLS = "calling tools"
_STRUCTURE = "output in a given structure"
_SEARCH = "beam search"

_COMMON: dict[str, Refusal] = {
    "response_format": Refusal(_STRUCTURE, ({"type": "text"},)),
    "structured_outputs": Refusal(_STRUCTURE, ({},)),
    "guided_json": Refusal(_STRUCTURE),
    "guided_regex": Refusal(_STRUCTURE),
    "guided_choice": Refusal(_STRUCTURE),
    "guided_grammar": Refusal(_STRUCTURE),
    "guided_decoding_backend": Refusal(_STRUCTURE),
    "guided_whitespace_pattern": Refusal(_STRUCTURE),
    "prompt_logprobs": Refusal("logprobs of the prompt"),
    "bad_words": Refusal("forbidding words", ([],)),
    "logits_processors": Refusal("code from clients", ([],)),
    "use_beam_search": Refusal(_SEARCH, (False,)),
    "length_penalty": Refusal(_SEARCH, (1,)),
    "early_stopping": Refusal(_SEARCH, (False,)),
    "truncate_prompt_tokens": Refusal("cutting the prompt"),
    "spaces_between_special_tokens": Refusal("text without spaces between special tokens", (True,)),
    "return_tokens_as_token_ids": Refusal("token ids in place of texts; ask for return_token_ids", (False,)),
    "kv_transfer_params": Refusal("handing over the KV cache"),
    "vllm_xargs": Refusal("arguments of another server", ({},)),
}

CHAT: dict[str, Refusal] = _COMMON | {
    "tools": Refusal(_TOOLS, ([],)),
    "tool_choice": Refusal(_TOOLS, ("none",)),
    "parallel_tool_calls": Refusal(_TOOLS),
    "functions": Refusal(_TOOLS, ([],)),
    "function_call": Refusal(_TOOLS, ("none",)),
    "reasoning_effort": Refusal("an effort of reasoning", ("none",)),
    "include_reasoning": Refusal("leaving reasoning out of an answer", (True,)),
    "thinking_token_budget": Refusal("a bound on reasoning"),
    "verbosity": Refusal("a length of answers; ask for it in the messages", ("medium",)),
    "modalities": Refusal("output other than text", (["text"], [])),
    "audio": Refusal("output other than text"),
    "prediction": Refusal("predicted output"),
    "web_search_options": Refusal("searching the web"),
    "moderation": Refusal("moderation"),
    "echo": Refusal("echo of a conversation; use /v1/completions", (False,)),
    "chat_template": Refusal("templates from clients; the model's own is used"),
    "documents": Refusal("documents beside the messages; put them into a message", ([],)),
    "mm_processor_kwargs": Refusal("input other than text", ({},)),
    "media_io_kwargs": Refusal("input other than text", ({},)),
}

COMPLETION: dict[str, Refusal] = _COMMON | {
    "suffix": Refusal("inserting before a suffix", ("",)),
    "prompt_embeds": Refusal("embeddings as prompt"),
}

TOKENIZE: dict[str, Refusal] = {name: CHAT[name] for name in ("tools", "chat_template", "documents")}

STREAM_OPTIONS: dict[str, Refusal] = {"include_obfuscation": Refusal("padding of chunks", (False,))}

MESSAGE: dict[str, Refusal] = {
    "audio": Refusal("input other than text"),
    "function_call": Refusal("calls of functions in OpenAI's first form; use tool_calls"),
    "refusal": Refusal("refusals in a conversation; put the text into content"),
}


def refuse(given: Mapping[str, Any], table: Mapping[str, Refusal], where: str = "") -> None:
    """Raise InvalidRequest (code "unsupported_parameter") for the first field that asks for what cannot be had."""
    for name, refusal in table.items():
        value = given.get(name)
        if value is not None and not any(_same(value, neutral) for neutral in refusal.neutral):
            remedy = f"leave it out or send {shown(refusal.neutral[0])}" if refusal.neutral else "leave it out"
            message = f"{where}{name} is {shown(value)}: this server does not support {refusal.what}; {remedy}"
            raise InvalidRequest(message, param=f"{where}{name}", code="unsupported_parameter")


def _same(value: object, neutral: object) -> bool:
    """Whether both are the same JSON value: false is not 0, 1.0 is 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
