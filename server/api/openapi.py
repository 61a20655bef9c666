"""/openapi.json: the framework's description of plain routes, completed by those that read their bodies themselves.

Must not know: what routes do.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.protocol.chat import ChatRequest
from server.protocol.completion import CompletionRequest
from server.protocol.responses import ChatCompletion, Detokenized, TextCompletion, Tokenized
from server.protocol.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

REF = "#/components/schemas/{}"

# path -> (summary, tag, request models, response struct, whether it can stream)
_BODIES: dict[str, tuple[str, str, tuple[type[BaseModel], ...], type[msgspec.Struct], bool]] = {
    "/v1/chat/completions": ("Continue a conversation", "generation", (ChatRequest,), ChatCompletion, True),
    "/v1/completions": ("Continue a text", "generation", (CompletionRequest,), TextCompletion, True),
    "/tokenize": (
        "A text's or a conversation's token ids",
        "tokens",
        (TokenizeTextRequest, TokenizeChatRequest),
        Tokenized,
        False,
    ),
    "/detokenize": ("The text of token ids", "tokens", (DetokenizeRequest,), Detokenized, False),
}

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(app: FastAPI) -> None:
    """Have `app` answer /openapi.json with all its routes."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app)
        return app.openapi_schema

    app.openapi = schema


def _schema(app: FastAPI) -> dict[str, Any]:
    described: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    requests = sorted({model for _, _, models, _, _ in _BODIES.values() for model in models}, key=lambda m: m.__name__)
    _, definitions = models_json_schema(
        [(model, "validation") for model in requests], ref_template=REF.format("{model}")
    )
    _, responses = msgspec.json.schema_components(
        [response for _, _, _, response, _ in _BODIES.values()], ref_template=REF.format("{name}")
    )
    components = described.setdefault("components", {})
    components["schemas"] = {
        name: schema
        for name, schema in components.get("schemas", {}).items()
        if name not in ("HTTPValidationError", "ValidationError")  # never sent: errors have one form
    } | {**definitions["$defs"], **responses, "Error": _ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, (summary, tag, models, response, streams) in _BODIES.items():
        described["paths"].setdefault(path, {})["post"] = {
            "summary": summary,
            "tags": [tag],
            "requestBody": {"required": True, "content": {"application/json": {"schema": _one_of(models)}}},
            "responses": {"200": {"description": "The answer", "content": _content(response, streams=streams)}},
        }
    for operations in described["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {
                "description": "An error",
                "content": {"application/json": {"schema": {"$ref": REF.format("Error")}}},
            }
    return described


def _one_of(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    refs = [{"$ref": REF.format(model.__name__)} for model in models]
    return refs[0] if len(refs) == 1 else {"oneOf": refs}


def _content(response: type[msgspec.Struct], *, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REF.format(response.__name__)}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content
