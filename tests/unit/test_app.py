"""The application on the fake runtime over a real socket: states, models, metrics, and the one error format."""

import asyncio
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from megakernel_runtime.interface import RuntimeSpec
from server.app import build_app
from server.plan import ServePlan
from server.scheduling.settings import SchedulerSettings


@asynccontextmanager
async def serving():
    plan = ServePlan(
        host="127.0.0.1",
        port=0,
        served_names=("tiny", "alias"),
        model_path=Path("unused"),
        runtime=RuntimeSpec(backend="fake", model_path=""),
        scheduler=SchedulerSettings(),
    )
    app = build_app(plan)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                yield app, client
        finally:
            server.should_exit = True
            await running


@pytest.mark.asyncio
async def test_states_models_metrics_and_errors():
    async with serving() as (app, client):
        assert (await client.get("/live")).status_code == 200
        early = await client.get("/ready")
        if early.status_code != 200:
            assert early.status_code == 503
            assert early.headers["retry-after"] == "1"
            assert early.headers["retry-after-ms"] == "1000"
        await asyncio.wait_for(app.state.engine.wait_for("ready"), 30)
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/health")).content == b""
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["tiny", "alias"]
        assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
        families = {family.name for family in text_string_to_metric_families((await client.get("/metrics")).text)}
        assert "vllm:num_requests_running" in families
        for answer, status in (
            (await client.get("/v1/models/other"), 404),
            (await client.get("/nowhere"), 404),
            (await client.delete("/live"), 405),
        ):
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "tiny, alias" in (await client.get("/v1/models/other")).json()["error"]["message"]
