"""Routes that say how the server is: live, ready, health, version, metrics. Must not know: generation."""

from __future__ import annotations

from fastapi import APIRouter, Response

from server.api.service import Service
from server.version import version


def health_routes(service: Service) -> APIRouter:
    """Return the router. /live answers while the process does; /ready and /health 503 unless requests are taken."""

    async def live() -> dict[str, str]:
        return {"status": "live"}

    async def ready() -> dict[str, str]:
        service.require_ready()
        return {"status": "ready"}

    async def health() -> Response:
        service.require_ready()
        return Response()

    async def show_version() -> dict[str, str]:
        return {"version": version()}

    async def show_metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": service.metrics.content_type})

    router = APIRouter(tags=["state"])
    for path, endpoint, summary in (
        ("/live", live, "Whether the process answers"),
        ("/ready", ready, "Whether requests are taken; 503 and Retry-After if not"),
        ("/health", health, "The same with an empty body, as vLLM has it"),
        ("/version", show_version, "The server's version"),
        ("/metrics", show_metrics, "Prometheus text format"),
    ):
        router.add_api_route(path, endpoint, methods=["GET"], summary=summary)
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return router
