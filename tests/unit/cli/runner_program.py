"""A server around a scripted engine, for test_runner.py: `python runner_program.py DRAIN_SECONDS [fail]`. Says on stderr what happens."""

import asyncio
import logging
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from megakernel_runtime.interface import RuntimeSpec
from server.cli.runner import listen, run
from server.cli.startup import LogDisplay
from server.engine.messages import Hello, Loading
from server.plan import ServePlan
from server.scheduling.settings import SchedulerSettings
from server.telemetry.logging import configure

logger = logging.getLogger(__name__)

HELLO = Hello(1, 2048, 100, 4, 8, 16, "fake", "none", "none", 0, 0)


class Engine:
    """Loads, is ready or fails, and is drained once nothing is in flight."""

    def __init__(self, *, fails):
        self.state, self.hello, self.loading, self.failure, self.fails = "loading", None, None, None, fails
        self.draining, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()

    async def load(self):
        for done in range(3):
            self.loading = Loading("weights", done, 2)
            await asyncio.sleep(0.06)
        self.hello, self.state = (None, "failed") if self.fails else (HELLO, "ready")
        self.failure = "no memory" if self.fails else None

    async def drain(self, timeout_s):
        self.draining.set()
        try:
            await asyncio.wait_for(self.idle.wait(), timeout_s)
        except TimeoutError:
            logger.info("drain ran out of time")

    async def close(self):
        logger.info("engine closed")


def main():
    configure("info", "json")
    engine = Engine(fails="fail" in sys.argv)
    loading = []

    @asynccontextmanager
    async def lifespan(app):
        loading.append(asyncio.create_task(engine.load()))
        yield
        logger.info("lifespan ended")

    app = FastAPI(lifespan=lifespan)

    @app.get("/slow")
    async def slow():
        engine.idle.clear()
        logger.info("slow began")
        await engine.draining.wait()
        engine.idle.set()
        return "done"

    @app.get("/never")
    async def never():
        engine.idle.clear()
        logger.info("never began")
        await asyncio.Event().wait()

    plan = ServePlan(
        host="127.0.0.1",
        port=0,
        served_names=("fake",),
        model_path=Path("fake"),
        runtime=RuntimeSpec(backend="fake", model_path="fake"),
        scheduler=SchedulerSettings(),
        drain_seconds=float(sys.argv[1]),
    )
    run(app, engine, plan, listen(plan.host, plan.port), LogDisplay())


main()
