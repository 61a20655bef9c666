"""Routes between texts and token ids: /tokenize and /detokenize, as vLLM has them. Must not know: generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.body import read_json_body
from server.api.job import chat_prompt, check_ids, text_prompt
from server.api.service import Loaded, Service
from server.protocol.parse import parse_detokenize, parse_tokenize
from server.protocol.responses import Detokenized, Tokenized
from server.protocol.tokenize import TokenizeTextRequest

COUNTED_BYTES = 2**20  # of a text that is too long for the context: who asks for its length may want to cut it

Answer = Callable[[Service, Loaded, bytes], Tokenized | Detokenized]


def token_routes(service: Service) -> APIRouter:
    """Return the router. Both routes show exactly what generation does with the same fields."""

    async def answer(work: Answer, request: Request) -> Response:
        loaded = service.require_ready()
        raw = await read_json_body(request.scope, request.receive, service.plan.limits)
        return Response(
            msgspec.json.encode(await asyncio.to_thread(work, service, loaded, raw)), media_type="application/json"
        )

    async def tokenize(request: Request) -> Response:
        return await answer(_tokenize, request)

    async def detokenize(request: Request) -> Response:
        return await answer(_detokenize, request)

    router = APIRouter(tags=["tokens"])
    router.add_api_route("/tokenize", tokenize, methods=["POST"])
    router.add_api_route("/detokenize", detokenize, methods=["POST"])
    return router


def _tokenize(service: Service, loaded: Loaded, raw: bytes) -> Tokenized:
    request = parse_tokenize(raw, service.plan.limits)
    service.check_model(request.model)
    tokenizer = loaded.text.tokenizer
    if isinstance(request, TokenizeTextRequest):
        ids = text_prompt(request.prompt, loaded, add_special=request.add_special_tokens, allowance_bytes=COUNTED_BYTES)
    else:
        ids = chat_prompt(request, loaded, allowance_bytes=COUNTED_BYTES)
    return Tokenized(
        count=len(ids),
        max_model_len=loaded.context_tokens,
        tokens=list(ids),
        token_strs=[tokenizer.token_text(i) for i in ids] if request.return_token_strs else None,
    )


def _detokenize(service: Service, loaded: Loaded, raw: bytes) -> Detokenized:
    request = parse_detokenize(raw, service.plan.limits)
    service.check_model(request.model)
    check_ids("tokens", request.tokens, loaded)
    return Detokenized(prompt=loaded.text.tokenizer.decode(request.tokens, skip_special=False))
