"""Routes that say how the server is and what it serves: live, ready, health, version, metrics, models.

Must not know: generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import APIRouter, Response

from server.engine.client import EngineClient
from server.errors import NotFound, NotReady
from server.plan import ServePlan
from server.telemetry.metrics import Metrics
from server.version import version

RETRY_AFTER_S = 1.0


def health_routes(plan: ServePlan, engine: EngineClient, metrics: Metrics) -> APIRouter:
    """Return the router. /live answers while the process does; /ready and /health 503 unless the engine serves."""
    router = APIRouter()
    router.include_router(_state_routes(engine, metrics))
    router.include_router(_model_routes(plan.served_names))
    return router


def _state_routes(engine: EngineClient, metrics: Metrics) -> APIRouter:
    def check_ready() -> None:
        if engine.state != "ready":
            raise NotReady(f"the engine is {engine.state}", code=engine.state, retry_after_s=RETRY_AFTER_S)

    async def live() -> dict[str, str]:
        return {"status": "live"}

    async def ready() -> dict[str, str]:
        check_ready()
        return {"status": "ready"}

    async def health() -> Response:
        check_ready()
        return Response()

    async def show_version() -> dict[str, str]:
        return {"version": version()}

    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return _router(
        {"/live": live, "/ready": ready, "/health": health, "/version": show_version, "/metrics": show_metrics}
    )


def _model_routes(served_names: tuple[str, ...]) -> APIRouter:
    created = int(time.time())

    def card(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": created, "owned_by": "megakernel"}

    async def models() -> dict[str, object]:
        return {"object": "list", "data": [card(name) for name in served_names]}

    async def model(name: str) -> dict[str, object]:
        if name not in served_names:
            served = ", ".join(served_names)
            raise NotFound(f"no model {name!r} here; served: {served}", param="model", code="model_not_found")
        return card(name)

    return _router({"/v1/models": models, "/v1/models/{name:path}": model})


def _router(endpoints: dict[str, Callable[..., object]]) -> APIRouter:
    router = APIRouter()
    for path, endpoint in endpoints.items():
        router.add_api_route(path, endpoint, methods=["GET"])
    return router
