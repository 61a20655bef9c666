"""The composition root: builds text side, engine client, metrics and routes from a plan, and owns their lives.

Must not know: settings' origins, tensors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from server.api.errors import install_error_handlers
from server.api.generate import ChatRoute, CompletionRoute
from server.api.health import health_routes
from server.api.keys import KeyGuard
from server.api.middleware import RequestMiddleware
from server.api.models import model_routes
from server.api.openapi import describe
from server.api.service import Service, TextSide
from server.api.tokens import token_routes
from server.engine.client import EngineClient
from server.engine.supervisor import Supervision
from server.plan import ServePlan
from server.telemetry.metrics import Metrics
from server.text.chat_template import load_chat_template
from server.text.tokenizer import load_tokenizer
from server.version import version


def build_app(plan: ServePlan, *, supervision: Supervision | None = None) -> FastAPI:
    """Return the application; `app.state.engine` is its engine client, started by the lifespan without waiting, and
    `app.state.service` what its routes share. Raises ModelError: tokenizer or chat template cannot be read.
    """
    tokenizer = load_tokenizer(plan.model_path)
    text = TextSide(tokenizer, load_chat_template(tokenizer))
    engine = EngineClient(
        plan.runtime, plan.scheduler, supervision=supervision, log_level=plan.log_level, log_format=plan.log_format
    )
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

    app = FastAPI(
        title="Megakernel", version=version(), lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.engine, app.state.service = engine, Service(plan, text, engine, metrics)
    _add_routes(app, app.state.service)
    _add_layers(app, plan, metrics)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    app.router.routes += [
        Route(route.path, route, methods=["POST"]) for route in (ChatRoute(service), CompletionRoute(service))
    ]
    for router in (token_routes(service), model_routes(service), health_routes(service)):
        app.include_router(router)
    describe(app)
    install_error_handlers(app)


def _add_layers(app: FastAPI, plan: ServePlan, metrics: Metrics) -> None:
    """Wrap the routes; the last added is the outermost."""
    app.add_middleware(KeyGuard, plan.api_keys, metrics_public=plan.metrics_public)
    if plan.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=plan.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", "retry-after-ms"),
        )
    app.add_middleware(RequestMiddleware, metrics)


def _note_state(engine: EngineClient, metrics: Metrics, state: str) -> None:
    metrics.ready(state == "ready")
    if state == "restarting":
        metrics.engine_restarted()
    if state == "ready" and (hello := engine.hello) is not None:
        metrics.engine_loaded(version=version(), backend=hello.backend, device=hello.device, model=hello.model)
