"""A request's bytes -> a checked request model. All that can be judged without model and engine is judged here.

Order: JSON, fields that cannot be honoured, types and bounds, bounds that the operator sets, fields that contradict
each other. Must not know: tokenizers, the engine, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from server.errors import InvalidRequest
from server.plan import Limits
from server.protocol import refused
from server.protocol.base import RequestModel
from server.protocol.chat import ChatRequest
from server.protocol.completion import CompletionRequest
from server.protocol.generation import GenerationRequest
from server.protocol.json_body import parse_object
from server.protocol.problems import as_invalid_request
from server.protocol.refused import Refusal, refuse
from server.protocol.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

Model = TypeVar("Model", bound=RequestModel)


def parse_chat(raw: bytes, limits: Limits) -> ChatRequest:
    """Return the request. Raises InvalidRequest."""
    given = _given(raw, limits, refused.CHAT)
    _refuse_in_messages(given)
    request = _validate(ChatRequest, given)
    _check_shared(request, limits)
    if request.top_logprobs is not None:
        _at_most("top_logprobs", request.top_logprobs, limits.max_top_logprobs)
        if not request.logprobs:
            raise _contradiction("top_logprobs", "top_logprobs is given without logprobs; set logprobs to true")
    _check_template_flags(request)
    return request


def parse_completion(raw: bytes, limits: Limits) -> CompletionRequest:
    """Return the request. Raises InvalidRequest."""
    request = _validate(CompletionRequest, _given(raw, limits, refused.COMPLETION))
    _check_shared(request, limits)
    n_prompts = len(request.prompt)
    _at_most("prompt", n_prompts, limits.max_prompts, " prompts; split them over several requests")
    if n_prompts * request.n > limits.max_choices:
        message = f"n is {request.n}, for {n_prompts} prompts; at most {limits.max_choices} choices fit into a request"
        raise InvalidRequest(f"{message}: split the prompts", param="n", code="above_max_value")
    if request.logprobs is not None:
        _at_most("logprobs", request.logprobs, limits.max_top_logprobs)
        if request.echo:
            message = "logprobs with echo would need logprobs of the prompt, which this server has not; leave out one"
            raise InvalidRequest(message, param="logprobs", code="unsupported_parameter")
    if request.best_of is not None and request.best_of != request.n:
        message = f"best_of is {request.best_of} and n is {request.n}: this server does not rank choices; leave it out"
        raise InvalidRequest(message, param="best_of", code="unsupported_parameter")
    return request


def parse_tokenize(raw: bytes, limits: Limits) -> TokenizeTextRequest | TokenizeChatRequest:
    """Return the request: a text's or a conversation's. Raises InvalidRequest."""
    given = _given(raw, limits, refused.TOKENIZE)
    if ("prompt" in given) == ("messages" in given):
        raise InvalidRequest("exactly one of prompt and messages must be given", param="prompt")
    if "prompt" in given:
        return _validate(TokenizeTextRequest, given)
    _refuse_in_messages(given)
    request = _validate(TokenizeChatRequest, given)
    _check_template_flags(request)
    return request


def parse_detokenize(raw: bytes, limits: Limits) -> DetokenizeRequest:
    """Return the request. Raises InvalidRequest."""
    return _validate(DetokenizeRequest, _given(raw, limits, {}))


def _given(raw: bytes, limits: Limits, table: Mapping[str, Refusal]) -> dict[str, Any]:
    """Return the fields that were given; null is not, in OpenAI's API as in vLLM's."""
    body = parse_object(raw, max_depth=limits.max_json_depth)
    given = {name: value for name, value in body.items() if value is not None}
    refuse(given, table)
    options = given.get("stream_options")
    if isinstance(options, dict):
        held = {name: value for name, value in cast("dict[str, Any]", options).items() if value is not None}
        refuse(held, refused.STREAM_OPTIONS, "stream_options.")
        given["stream_options"] = held
    return given


def _refuse_in_messages(given: Mapping[str, Any]) -> None:
    messages = given.get("messages")
    for i, message in enumerate(cast("list[object]", messages) if isinstance(messages, list) else []):
        if isinstance(message, dict):
            refuse(cast("dict[str, Any]", message), refused.MESSAGE, f"messages[{i}].")


def _validate(model: type[Model], given: Mapping[str, Any]) -> Model:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise as_invalid_request(error) from None


def _check_shared(request: GenerationRequest, limits: Limits) -> None:
    _at_most("n", request.n, limits.max_n)
    _at_most("stop", len(request.stop), limits.max_stop_strings, " strings")
    _at_most("stop", max(map(len, request.stop), default=0), limits.max_stop_characters, " characters in a string")
    _at_most("logit_bias", len(request.logit_bias), limits.max_logit_bias, " tokens")
    _at_most("stop_token_ids", len(request.stop_token_ids), limits.max_stop_token_ids, " ids")
    if request.allowed_token_ids == ():
        raise _contradiction("allowed_token_ids", "allowed_token_ids is empty, so no token may come; name at least one")
    if request.stream_options is not None and not request.stream:
        raise _contradiction("stream_options", "stream_options is given without stream; set stream to true")
    asked = {value for value in (request.max_tokens, request.max_completion_tokens) if value is not None}
    if len(asked) > 1:
        message = (
            f"max_tokens is {request.max_tokens} and max_completion_tokens {request.max_completion_tokens}; "
            "they mean the same, so give one"
        )
        raise _contradiction("max_tokens", message)
    if asked and request.min_tokens > min(asked):
        message = f"min_tokens is {request.min_tokens}; it must be at most max_tokens, which is {min(asked)}"
        raise _contradiction("min_tokens", message)


def _check_template_flags(request: ChatRequest | TokenizeChatRequest) -> None:
    if request.continue_final_message and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt are both true; only one can be"
        raise _contradiction("continue_final_message", message)


def _at_most(name: str, value: int, limit: int, unit: str = "") -> None:
    if value > limit:
        holds = "holds" if unit else "is"
        raise InvalidRequest(
            f"{name} {holds} {value}; it must be at most {limit}{unit}", param=name, code="above_max_value"
        )


def _contradiction(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")
