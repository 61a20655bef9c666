"""The composition root: builds metrics, engine client and routes from a plan, and owns their lives.

Must not know: settings' origins, tensors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from server.api.errors import install_error_handlers
from server.api.health import health_routes
from server.engine.client import EngineClient
from server.plan import ServePlan
from server.telemetry.metrics import Metrics
from server.version import version


def build_app(plan: ServePlan) -> FastAPI:
    """Return the application; `app.state.engine` is its engine client, started by the lifespan without waiting."""
    engine = EngineClient(plan.runtime, plan.scheduler, log_level=plan.log_level, log_format=plan.log_format)
    metrics = Metrics(plan.served_names[0])
    engine.on_observations(metrics.observe_engine)
    engine.on_state(lambda state: _note_state(engine, metrics, state))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.close()

    app = FastAPI(title="Megakernel", version=version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine = engine
    app.include_router(health_routes(plan, engine, metrics))
    install_error_handlers(app)
    return app


def _note_state(engine: EngineClient, metrics: Metrics, state: str) -> None:
    metrics.ready(state == "ready")
    if state == "restarting":
        metrics.engine_restarted()
    if state == "ready" and (hello := engine.hello) is not None:
        metrics.engine_loaded(version=version(), backend=hello.backend, device=hello.device, model=hello.model)
