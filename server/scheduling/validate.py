"""Whether a request can ever run on a runtime of given sizes; says why not, with value, limit and remedy.

Must not know: what runs or waits now.
"""

from __future__ import annotations

from megakernel_runtime.interface import MAX_TOP_LOGPROBS, Capacity
from server.scheduling.requests import NewRequest, Refusal


def longest(capacity: Capacity) -> int:
    """Return how many tokens one sequence may have: the model's bound, or what all pages together hold.

    The last token of a sequence needs no place in a page: nothing is computed from it.
    """
    return min(capacity.max_model_len_tokens, capacity.n_pages * capacity.page_size_tokens + 1)


def refuse(new: NewRequest, capacity: Capacity) -> Refusal | None:
    """Return why `new` can never run; None if it can. "invalid" is a bug of the caller, not the user's doing."""
    if problem := _invalid(new, capacity.vocab_size):
        return Refusal(new.key, "invalid", problem)
    prompt, limit, output = len(new.prompt), longest(capacity), new.sampling.max_tokens
    if prompt + output <= limit:
        return None
    return Refusal(
        new.key,
        "too_long",
        f"{prompt} prompt tokens and up to {output} generated ones are {prompt + output} tokens; {limit} fit into "
        f"this server's context: shorten the prompt or lower max_tokens",
    )


def _invalid(new: NewRequest, vocab_size: int) -> str | None:
    """Return what is wrong with values that the API should never have sent."""
    sampling = new.sampling
    if not new.prompt:
        return "the prompt has no tokens; it needs at least one"
    if new.n < 1:
        return f"n is {new.n}; it must be at least 1"
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 1"
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        return f"top_logprobs is {sampling.top_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}"
    named = {
        "prompt": new.prompt,
        "logit_bias": tuple(token for token, _ in sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, tokens in named.items():
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            return f"{name} has token id {wrong}; the vocabulary has ids 0 to {vocab_size - 1}"
    return None
