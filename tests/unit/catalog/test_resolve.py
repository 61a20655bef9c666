"""What an operator calls a model becomes a path: entries, directories, GGUF files, hub ids, and helpful refusals."""

import importlib

import pytest

from server.catalog.entries import HubSource, ModelEntry, PathSource
from server.catalog.resolve import cached_path, resolve
from server.errors import ModelError
from tests.unit.catalog.conftest import MODEL


@pytest.fixture
def names(published, tmp_path, monkeypatch):
    """Resolve a name with three entries known: a wheel, a path, a hub repository. Nothing reaches the network."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    known = (
        published.entry,
        ModelEntry("mine", "A path.", PathSource(str(tmp_path / "mine"))),
        ModelEntry("lost", "A path that is gone.", PathSource(str(tmp_path / "gone"))),
        ModelEntry("hubby", "A repository.", HubSource("org/hubby", "v1")),
    )
    resolve_module = importlib.import_module("server.catalog.resolve")  # the package's attribute is the function
    monkeypatch.setattr(resolve_module, "entries", lambda: known)
    monkeypatch.setattr(resolve_module, "fetch_hub", lambda *asked: ("fetched from the hub", *asked))
    monkeypatch.setenv("PIP_INDEX_URL", f"{published.site.url}/simple")
    monkeypatch.chdir(tmp_path)

    def find(name):
        return resolve(name, cache_dir=published.cache, progress=published.progress)

    find.known = {entry.name: entry for entry in known}
    find.cache = published.cache
    return find


def directory(path, *files):
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize("name", ["toy", "TOY", "toy-instruct"])
def test_a_wheel_s_model_has_its_file_in_the_cache(names, published, name):
    assert names(name) == published.target
    assert published.target.read_bytes() == MODEL


def test_an_entry_may_be_a_path(names, tmp_path):
    assert names("mine") == tmp_path / "mine"


def test_an_entry_s_path_that_is_gone_is_told(names, tmp_path):
    with pytest.raises(ModelError, match=f"lost should lie at {tmp_path}/gone, which does not exist"):
        names("lost")


@pytest.mark.parametrize("name", ["hubby", "org/hubby", "Org/Hubby"])
def test_an_entry_may_be_a_repository_of_the_hub(names, name):
    assert names(name)[:3] == ("fetched from the hub", "org/hubby", "v1")


def test_any_hub_id_is_fetched_from_its_main_branch(names):
    assert names("someone/some-Model.v2")[:4] == ("fetched from the hub", "someone/some-Model.v2", "main", names.cache)


def test_a_hugging_face_directory_is_taken_where_it_is(names, tmp_path):
    model = directory(tmp_path / "some" / "model", "config.json")
    assert names(str(model)) == model
    assert str(names("some/model")) == "some/model"


def test_a_path_that_exists_comes_before_a_hub_id_of_that_name(names, tmp_path):
    directory(tmp_path / "org" / "hubby", "config.json")
    assert str(names("org/hubby")) == "org/hubby"


def test_a_directory_named_like_an_entry_does_not_hide_the_entry(names, tmp_path):
    directory(tmp_path / "lost", "config.json")
    with pytest.raises(ModelError, match="should lie at"):
        names("lost")
    assert str(names("./lost")) == "lost"


def test_a_gguf_file_is_taken_where_it_is(names, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert names(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"


def test_the_home_directory_may_be_written_as_a_tilde(names, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/mine") == tmp_path / "mine"


def test_a_directory_without_config_is_refused(names, tmp_path):
    directory(tmp_path / "empty")
    with pytest.raises(ModelError, match=r"empty holds no config\.json, .*a model's directory has a config\.json"):
        names("./empty")


def test_a_directory_of_gguf_files_names_them(names, tmp_path):
    directory(tmp_path / "ggufs", "b.gguf", "a.gguf")
    with pytest.raises(ModelError, match=r"name one of its files: a\.gguf, b\.gguf"):
        names("./ggufs")


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./model", "../model", "~/no-model", "no.gguf", "dir/no.gguf", r"C:\m"]
)
def test_paths_that_do_not_exist_are_told_as_such(names, name):
    with pytest.raises(ModelError, match="no such file or directory; pass a Hugging Face directory") as caught:
        names(name)
    assert str(caught.value).startswith(name)


def test_unknown_names_are_told_with_the_nearest_and_all_known_ones(names):
    with pytest.raises(
        ModelError, match="no model is called 'toi'; did you mean 'toy'\\? Known: toy, mine, lost, hubby"
    ):
        names("toi")
    with pytest.raises(ModelError, match="no model is called 'gpt-5'; Known: "):
        names("gpt-5")


@pytest.mark.parametrize("name", ["a/b/c", "/", "org/", "-x/y", "a b"])
def test_what_is_no_hub_id_is_not_asked_for(names, name):
    with pytest.raises(ModelError):
        names(name)


class TestCachedPath:
    def test_a_wheel_s_model(self, names, published):
        assert cached_path(published.entry, published.cache) is None
        published.target.parent.mkdir(parents=True)
        published.target.write_bytes(bytes(published.entry.size_bytes))
        assert cached_path(published.entry, published.cache) == published.target
        assert published.site.asked == []

    def test_a_path(self, names, tmp_path):
        assert cached_path(names.known["mine"], names.cache) == tmp_path / "mine"
        assert cached_path(names.known["lost"], names.cache) is None

    def test_a_repository(self, names):
        assert cached_path(names.known["hubby"], names.cache) is None
