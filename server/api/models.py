"""Routes that say what is served. Must not know: generation."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from server.api.service import Service
from server.protocol.responses import ModelCard, ModelList


def model_routes(service: Service) -> APIRouter:
    """Return the router: one card for each name, all of them standing for the same model."""
    names = service.plan.served_names

    def card(name: str) -> ModelCard:
        hello = service.engine.hello
        context = None if hello is None else hello.max_model_len_tokens
        return ModelCard(id=name, created=service.created, max_model_len=context, root=names[0])

    async def models() -> Response:
        return _json(ModelList([card(name) for name in names]))

    async def model(name: str) -> Response:
        return _json(card(service.check_model(name)))

    router = APIRouter(tags=["models"])
    router.add_api_route("/v1/models", models, methods=["GET"], summary="What is served")
    router.add_api_route("/v1/models/{name:path}", model, methods=["GET"], summary="One served name")
    return router


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
