"""Servers for the API tests, started once for each plan and shared by all tests that ask for the same."""

import pytest

from megakernel_runtime.interface import RuntimeSpec
from tests.api.harness import FAST, Served, make_plan, write_tiny_model
from tests.api.process import Process


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def serve(tiny_path):
    """serve(script, model_path=..., **plan): a ready server on the fake runtime."""
    running = {}

    def get(script=None, *, model_path=tiny_path, **changes):
        plan = make_plan(model_path, script, **changes)
        if plan not in running:
            running[plan] = Served(plan, FAST)
        return running[plan].wait_for("ready")

    yield get
    for served in running.values():
        served.close()


@pytest.fixture(scope="session")
def serve_real(real_model_path):
    """serve_real(): a ready server on a backend, cpu unless named, with the default model."""
    running = {}

    def get(backend="cpu"):
        if backend not in running:
            plan = make_plan(
                real_model_path,
                runtime=RuntimeSpec(backend, str(real_model_path), max_slots=8, max_model_len_tokens=1024, threads=2),
                served_names=("smollm2-135m",),
            )
            running[backend] = Served(plan)
        return running[backend].wait_for("ready")

    yield get
    for served in running.values():
        served.close()


@pytest.fixture
def start(tiny_path):
    """start(script, *flags): a server on the fake runtime as a process."""
    running = []

    def run(script, *flags):
        running.append(Process(tiny_path, script, *flags))
        return running[-1]

    yield run
    for process in running:
        process.close()
