"""Engine processes for tests: started in parallel with nothing, ended whatever happens."""

import json

import pytest

from megakernel_runtime.interface import RuntimeSpec
from server.engine.client import EngineClient
from server.engine.messages import Submit, WireSampling
from server.engine.supervisor import Supervision
from server.scheduling.settings import SchedulerSettings

FAST = {
    "hang_timeout_s": 2.0,
    "first_pause_s": 0.05,
    "longest_pause_s": 0.2,
    "stable_after_s": 60.0,
    "end_within_s": 2.0,
}


def ask(request_id="a", prompt=(1, 2, 3), n=1, **sampling):
    return Submit(request_id, prompt, WireSampling(**({"max_tokens": 4} | sampling)), n)


async def everything(client, request):
    """All replies to a request."""
    return [reply async for reply in client.submit(request)]


@pytest.fixture
async def engine():
    """A maker of started clients: engine(script, supervision={...}, **RuntimeSpec fields)."""
    clients = []

    async def start(script=None, *, ready=True, supervision=None, scheduler=None, **spec):
        client = EngineClient(
            RuntimeSpec("fake", "", fake_script=json.dumps({"emit": "echo"} | (script or {})), **spec),
            scheduler or SchedulerSettings(),
            supervision=Supervision(**(FAST | (supervision or {}))),
        )
        clients.append(client)
        await client.start()
        if ready:
            assert await client.wait_for("ready") == "ready"
        return client

    yield start
    for client in clients:
        await client.close()
