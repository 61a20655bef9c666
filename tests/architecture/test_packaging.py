"""The wheel holds what an installed server needs, and the container build sends exactly that."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "megakernel_runtime", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names in a wheel built from a copy, as the container's first stage builds it."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (built,) = (copy / "out").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_and_data_file_is_in_the_wheel(wheel, package):
    kinds = ("*.py", "*.toml", "py.typed")
    source = {str(path.relative_to(ROOT)) for kind in kinds for path in (ROOT / package).rglob(kind)}
    assert source
    assert source <= wheel


def test_nothing_else_is_in_the_wheel(wheel):
    assert {name.split("/")[0] for name in wheel if ".dist-info" not in name} == set(PACKAGES)


class TestDockerfile:
    text = (ROOT / "Dockerfile").read_text()

    def stages(self):
        return re.findall(r"^FROM (\S+)(?: AS (\S+))?$", self.text, re.MULTILINE)

    def test_both_images_can_be_asked_for(self):
        assert {"cpu", "gpu"} <= {name for _, name in self.stages()}

    def test_what_is_copied_exists_and_is_sent(self):
        allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", self.text, re.MULTILINE):
            for source in sources.split():
                assert (ROOT / source).exists()
                assert source in allowed

    @pytest.mark.parametrize("image", ["cpu", "gpu"])
    def test_images_end_as_a_user_without_rights(self, image):
        stage = re.split(rf"^FROM base AS {image}$", self.text, flags=re.MULTILINE)[1].split("\nFROM ")[0]
        assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE) == ["megakernel"]

    def test_images_are_checked_stopped_and_cached(self):
        for word in ("HEALTHCHECK", "STOPSIGNAL SIGTERM", "VOLUME /cache", "MEGAKERNEL_CACHE_DIR=/cache"):
            assert word in self.text

    def test_settings_of_the_image_are_settings(self):
        from server.settings import Settings

        for name in re.findall(r"MEGAKERNEL_([A-Z_]+)", self.text):
            assert name.lower() in Settings.model_fields


def test_every_place_that_installs_torch_asks_for_the_same():
    """The Makefile and the Dockerfile install it before the rest, from another index: pip must not change it after."""
    (wanted,) = re.findall(r'"(torch>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    for name in ("Makefile", "Dockerfile"):
        assert re.findall(r"torch>=[\d.,<=]+", (ROOT / name).read_text()) == [wanted], name
