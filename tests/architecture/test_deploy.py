"""What deploy/ says is true of the server: images, flags, variables, ports, paths and volumes are those of the code."""

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from server.api.keys import METRICS_PATH
from server.cli.app import app
from server.settings import ENV_PREFIX, Settings, load_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IMAGE_VARIABLES = dict(re.findall(r"^(?:ENV|   ) (\w+)=(\S+?)(?: \\)?$", DOCKERFILE, re.MULTILINE))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
GPU = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
SERVER, WATCHER = COMPOSE["services"]["server"], COMPOSE["services"]["prometheus"]


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


@pytest.fixture
def settings(monkeypatch):
    """The settings that the container starts with: its flags, its variables, the image's variables."""
    for name, value in (IMAGE_VARIABLES | SERVER["environment"]).items():
        if name.startswith(ENV_PREFIX):
            monkeypatch.setenv(name, value)
    command, *arguments = SERVER["command"]
    context = get_command(app).commands[command].make_context(command, arguments)
    return load_settings({name: value for name, value in context.params.items() if value is not None})


def test_every_flag_and_variable_is_known_and_in_bounds(settings):
    assert settings.model == Settings.model_fields["model"].default
    assert (settings.host, settings.log_format) == ("0.0.0.0", "json")


def test_images_are_stages_of_the_dockerfile():
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    for service in (SERVER, GPU["services"]["server"]):
        assert service["build"]["target"] in stages
        assert service["image"] == f"megakernel:{service['build']['target']}"
    assert (DEPLOY / SERVER["build"]["context"] / "Dockerfile").is_file()


def test_the_gpu_file_changes_services_that_are_there():
    assert set(GPU["services"]) <= set(COMPOSE["services"])
    (device,) = GPU["services"]["server"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_ports_are_open_to_this_machine_only(name):
    for port in COMPOSE["services"][name]["ports"]:
        assert port.startswith("127.0.0.1:")


def test_the_server_s_port_is_where_it_listens_and_what_the_image_exposes(settings):
    assert [port.split(":")[-1] for port in SERVER["ports"]] == [str(settings.port)]
    assert re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE) == [str(settings.port)]


def test_it_is_killed_later_than_it_drains(settings):
    assert seconds(SERVER["stop_grace_period"]) > settings.drain_seconds + 5  # what closing connections may take


def test_everything_that_is_written_lies_in_a_volume(settings):
    (volume,) = SERVER["volumes"]
    assert SERVER["read_only"]
    assert volume.split(":")[1] == str(settings.cache_dir) == "/cache"
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert IMAGE_VARIABLES[name].startswith("/cache/")


def test_volumes_are_declared_and_mounted_files_exist():
    used = [volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]]
    assert {name for name in used if not name.startswith(".")} == set(COMPOSE["volumes"])
    for name in used:
        assert not name.startswith(".") or (DEPLOY / name).is_file()


def test_prometheus_reads_the_file_that_is_mounted():
    (config,) = [flag.partition("=")[2] for flag in WATCHER["command"] if flag.startswith("--config.file=")]
    assert f"./prometheus.yml:{config}:ro" in WATCHER["volumes"]


def test_prometheus_asks_the_server_where_it_answers(settings):
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    assert jobs["megakernel"]["metrics_path"] == METRICS_PATH.decode()
    assert jobs["megakernel"]["static_configs"] == [{"targets": [f"server:{settings.port}"]}]
    assert settings.metrics_public or not settings.api_key
    ((listens,),) = [port.split(":")[-1:] for port in WATCHER["ports"]]
    assert jobs["prometheus"]["static_configs"] == [{"targets": [f"localhost:{listens}"]}]


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_commands_in_comments_name_files_that_exist(path):
    named = re.findall(r"-f (\S+?)[`\s]", path.read_text())
    assert named
    assert all((ROOT / name).is_file() for name in named)
