"""docs/http-api.md lists the endpoints and statuses that the server has, no more and no fewer."""

import re
from pathlib import Path

import pytest

from server import errors
from server.api.keys import METRICS_PATH, OPEN_PATHS
from server.app import build_app
from tests.api.harness import make_plan, write_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """What the application says of itself; no engine is started."""
    return build_app(make_plan(write_tiny_model(tmp_path_factory.mktemp("model")), {})).openapi()["paths"]


def test_endpoints_are_those_of_the_server(described):
    listed = {
        (path, method.lower()): summary
        for method, path, summary in re.findall(r"^\| `(GET|POST) (\S+)` \| (.*?) \|$", PAGE, re.MULTILINE)
    }
    assert listed.pop(("/openapi.json", "get"))
    assert listed == {
        (path, method): operation["summary"]
        for path, operations in described.items()
        for method, operation in operations.items()
    }


def test_routes_without_a_key_are_named():
    sentence = re.search(r"With API keys .*? need `Authorization", PAGE, re.DOTALL)[0]
    named = set(re.findall(r"`(/\w+)`", sentence))
    assert named == {path.decode() for path in (*OPEN_PATHS, METRICS_PATH)}


def test_statuses_are_those_of_the_errors():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ApiError)]
    listed = re.findall(r"^\| (\d{3}) \|", PAGE, re.MULTILINE)
    assert {int(status) for status in listed} == {kind.status for kind in kinds}
    assert listed == sorted(listed)


def test_flags_are_flags():
    from server.cli.options import flag_name
    from server.settings import Settings

    known = {flag_name(name) for name in Settings.model_fields} | {"--no-metrics-public"}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert named
    assert named <= known
