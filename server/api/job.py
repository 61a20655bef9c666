"""A checked request -> what the engine is to run and how its tokens become text.

Everything here needs the model: rendering, tokenizing, and the bounds that follow from vocabulary and context.
Must not know: HTTP, the engine's replies.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from server.api.service import Loaded
from server.engine.messages import Submit, WireSampling
from server.errors import InvalidRequest
from server.plan import Limits
from server.protocol.chat import ChatRequest, TemplateFields
from server.protocol.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from server.protocol.generation import GenerationRequest
from server.text.pipeline import OutputStream
from server.text.tokenizer import Tokenizer

LEAST_TEMPERATURE = 1e-5  # below it, f32 arithmetic on any device takes the most probable token, or fails


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to run: one Submit for each prompt, n choices each. Choice i of prompt p has index p*n + i."""

    id: str  # the response's
    submits: tuple[Submit, ...]
    prefixes: tuple[str, ...]  # one for each prompt: what its choices' texts begin with (echo)
    n: int
    tokenizer: Tokenizer
    stops: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    continues: bool  # the text goes on after the prompt's instead of beginning anew
    min_tokens: int

    def output(self) -> OutputStream:
        """Return a new stream for one choice."""
        return OutputStream(
            self.tokenizer,
            stops=self.stops,
            include_stop=self.include_stop,
            skip_special=self.skip_special,
            continues=self.continues,
            min_tokens=self.min_tokens,
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(submit.prompt) for submit in self.submits)


def chat_prompt(request: TemplateFields, loaded: Loaded, *, allowance_bytes: int = 0) -> tuple[int, ...]:
    """Return the tokens of the conversation as the model's template writes it. Raises InvalidRequest where the template
    refuses, or the text is far too long: longer than any that fits, and than `allowance_bytes`.
    """
    pieces = loaded.text.template.render(
        request.conversation(),
        add_generation_prompt=request.generation_prompt,
        continue_final_message=request.continue_final_message,
        kwargs=request.chat_template_kwargs,
    )
    _check_length("messages", pieces.text, loaded, allowance_bytes)
    return tuple(loaded.text.tokenizer.encode_pieces(pieces, add_special=request.add_special_tokens))


def text_prompt(text: str, loaded: Loaded, *, add_special: bool, allowance_bytes: int = 0) -> tuple[int, ...]:
    """Return the tokens of a text that is a prompt as it stands. Raises InvalidRequest as `chat_prompt` does."""
    _check_length("prompt", text, loaded, allowance_bytes)
    return tuple(loaded.text.tokenizer.encode(text, add_special=add_special, parse_special=True))


def _check_length(what: str, text: str, loaded: Loaded, allowance_bytes: int) -> None:
    """Raise InvalidRequest for a text that cannot fit into the context however it is cut into tokens: finding out how
    many they are takes seconds and a hundred times the text's memory.
    """
    context, n_bytes = loaded.context_tokens, len(text.encode())
    most = max(loaded.text.tokenizer.most_bytes(context), allowance_bytes)
    if n_bytes > most:
        raise InvalidRequest(
            f"This model's maximum context length is {context} tokens. However, your {what} resulted in {n_bytes} "
            f"bytes of text, which are more tokens; at most {most} bytes are looked at. "
            f"Please reduce the length of the {what}.",
            param=what,
            code="context_length_exceeded",
        )


def chat_job(request: ChatRequest, loaded: Loaded, limits: Limits) -> Job:
    """Return the job. Raises InvalidRequest: the template refuses, ids outside the vocabulary, context too small."""
    prompt = chat_prompt(request, loaded)
    top = (request.top_logprobs or 0) if request.logprobs else None
    return _job(
        request, loaded, limits, (prompt,), ("",), id_prefix="chatcmpl", top_logprobs=top,
        continues=request.continue_final_message, what="messages",
    )  # fmt: skip


def completion_job(request: CompletionRequest, loaded: Loaded, limits: Limits) -> Job:
    """Return the job. Raises InvalidRequest as `chat_job` does."""
    tokenizer = loaded.text.tokenizer
    prompts = tuple(_checked_prompt(prompt, request, loaded) for prompt in request.prompt)
    prefixes = tuple(_as_text(prompt, request, tokenizer) if request.echo else "" for prompt in request.prompt)
    return _job(
        request, loaded, limits, prompts, prefixes, id_prefix="cmpl", top_logprobs=request.logprobs,
        continues=True, what="prompt",
    )  # fmt: skip


def _checked_prompt(prompt: str | tuple[int, ...], request: CompletionRequest, loaded: Loaded) -> tuple[int, ...]:
    """Return the tokens of one of several prompts. Each is checked before the next is tokenized."""
    ids = text_prompt(prompt, loaded, add_special=request.add_special_tokens) if isinstance(prompt, str) else prompt
    check_ids("prompt", ids, loaded)
    if not ids:
        message = "prompt has no tokens; it needs at least one, and this model puts none before a text"
        raise InvalidRequest(message, param="prompt", code="invalid_value")
    _room(len(ids), loaded, "prompt")
    return ids


def _as_text(prompt: str | tuple[int, ...], request: CompletionRequest, tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special=request.skip_special_tokens)


def _job(
    request: GenerationRequest,
    loaded: Loaded,
    limits: Limits,
    prompts: tuple[tuple[int, ...], ...],
    prefixes: tuple[str, ...],
    *,
    id_prefix: str,
    top_logprobs: int | None,
    continues: bool,
    what: str,
) -> Job:
    check_ids("stop_token_ids", request.stop_token_ids, loaded)
    check_ids("allowed_token_ids", request.allowed_token_ids or (), loaded)
    unique = secrets.token_hex(12)
    submits = tuple(
        Submit(
            request_id=f"{unique}-{i}",
            prompt=prompt,
            sampling=_sampling(request, loaded, _room(len(prompt), loaded, what), top_logprobs),
            n=request.n,
            priority=request.priority,
            cache_salt=request.cache_salt or "",
            deadline_s=limits.request_deadline_seconds,
        )
        for i, prompt in enumerate(prompts)
    )
    return Job(
        id=f"{id_prefix}-{request.request_id or unique}",
        submits=submits,
        prefixes=prefixes,
        n=request.n,
        tokenizer=loaded.text.tokenizer,
        stops=request.stop,
        include_stop=request.include_stop_str_in_output,
        skip_special=request.skip_special_tokens,
        continues=continues,
        min_tokens=request.min_tokens,
    )


def _room(prompt_tokens: int, loaded: Loaded, what: str) -> int:
    """Return how many tokens can be generated after a prompt."""
    context = loaded.context_tokens
    if prompt_tokens < context:
        return context - prompt_tokens
    raise InvalidRequest(
        f"This model's maximum context length is {context} tokens. However, your {what} resulted in {prompt_tokens} "
        f"tokens, which leaves no room for an answer. Please reduce the length of the {what} to at most {context - 1}.",
        param=what,
        code="context_length_exceeded",
    )


def _sampling(request: GenerationRequest, loaded: Loaded, room: int, top_logprobs: int | None) -> WireSampling:
    asked = request.max_completion_tokens or request.max_tokens
    if asked is None and isinstance(request, CompletionRequest):
        asked = max(DEFAULT_MAX_TOKENS, request.min_tokens)
    max_tokens = room if asked is None else min(asked, room)
    ends = () if request.ignore_eos else loaded.text.tokenizer.eos_ids
    one_only = request.top_p == 0  # the smallest nucleus holds the most probable token
    return WireSampling(
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(pair for pair in request.logit_bias if pair[0] < loaded.hello.vocab_size),
        allowed_token_ids=request.allowed_token_ids or (),
        temperature=request.temperature if request.temperature >= LEAST_TEMPERATURE else 0.0,
        top_k=1 if one_only else max(request.top_k, 0),
        top_p=1.0 if one_only else request.top_p,
        min_p=request.min_p,
        seed=secrets.randbits(64) if request.seed is None else request.seed % 2**64,
        top_logprobs=top_logprobs,
        min_tokens=min(request.min_tokens, max_tokens),
        stop_token_ids=tuple(dict.fromkeys((*ends, *request.stop_token_ids))),
        max_tokens=max_tokens,
    )


def check_ids(name: str, ids: Iterable[int], loaded: Loaded) -> None:
    """Raise InvalidRequest if one of `ids` is not in the vocabulary."""
    size = min(loaded.hello.vocab_size, loaded.text.tokenizer.vocab_size)
    largest = max(ids, default=0)
    if largest >= size:
        message = f"{name} holds token id {largest}; the vocabulary has ids 0 to {size - 1}"
        raise InvalidRequest(message, param=name, code="invalid_value")
