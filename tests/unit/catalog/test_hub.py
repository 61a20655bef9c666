"""Models of the hub, from a hub of this machine: only what is needed is fetched, offline afterwards, errors explained."""

import hashlib
import json
import sys

import pytest

from server.catalog.hub import fetch_hub, hub_snapshot
from server.errors import ModelError

pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")

COMMIT = "c" * 40
REPO = "org/toy"
WANTED = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)) * 40,
}
UNWANTED = {
    "pytorch_model.bin": b"a pickle",
    "modeling_toy.py": b"code",
    "original/params.json": b"{}",
    "README.md": b"# Toy",
}


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """No token of this machine's user is sent; the library's own files stay in the test's directory."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))


@pytest.fixture
def hub(site):
    """Serve a repository as the hub does."""
    files = {**WANTED, **UNWANTED}
    info = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    site.put(f"/api/models/{REPO}/revision/main", json.dumps(info).encode(), "application/json")
    tree = [{"type": "file", "path": name, "size": len(data), "oid": etag(data)} for name, data in files.items()]
    site.put(f"/api/models/{REPO}/tree/{COMMIT}", json.dumps(tree).encode(), "application/json")
    for name, data in files.items():
        site.put(f"/{REPO}/resolve/{COMMIT}/{name}", data, ETag=f'"{etag(data)}"', X_Repo_Commit=COMMIT)
    return site


def etag(data):
    return hashlib.sha1(data).hexdigest()


def fetch(site, tmp_path, told=None, repo=REPO, revision="main"):
    report = (lambda *progress: told.append(progress)) if told is not None else (lambda *_: None)
    return fetch_hub(repo, revision, tmp_path / "cache", report, endpoint=site.url)


def test_weights_and_words_are_fetched_and_no_code_or_pickle(hub, tmp_path):
    path = fetch(hub, tmp_path)
    held = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert held == WANTED
    asked = {page for page, _ in hub.asked}
    assert not any(page.endswith(name) for page in asked for name in UNWANTED)


def test_progress_is_told_under_the_repository_s_name(hub, tmp_path, capfd):
    told = []
    fetch(hub, tmp_path, told)
    assert {phase for phase, _, _ in told} == {f"fetching {REPO}"}
    assert told[0][1:] == (0, 0)
    assert capfd.readouterr().err == ""


def test_afterwards_no_network_is_used(hub, tmp_path):
    path = fetch(hub, tmp_path)
    hub.asked.clear()
    assert fetch(hub, tmp_path) == path == hub_snapshot(REPO, "main", tmp_path / "cache")
    assert hub.asked == []


def test_before_nothing_is_said_to_be_here(tmp_path):
    assert hub_snapshot(REPO, "main", tmp_path) is None


def test_files_that_were_removed_are_fetched_again(hub, tmp_path):
    path = fetch(hub, tmp_path)
    (path / "config.json").unlink()
    assert hub_snapshot(REPO, "main", tmp_path / "cache") is None
    assert (fetch(hub, tmp_path) / "config.json").read_bytes() == WANTED["config.json"]


def test_a_fetch_that_broke_off_is_not_taken_for_whole(hub, tmp_path):
    del hub.pages[f"/{REPO}/resolve/{COMMIT}/model.safetensors"]
    with pytest.raises(ModelError, match=f"{REPO} cannot be fetched from the Hugging Face hub"):
        fetch(hub, tmp_path)
    assert hub_snapshot(REPO, "main", tmp_path / "cache") is None


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (403, "GatedRepo", "org/toy is gated: accept its licence .* HF_TOKEN"),
        (404, "RepoNotFound", "no model org/toy that may be read without a token; .* HF_TOKEN"),
        (404, "RevisionNotFound", "org/toy has no such revision"),
        (500, "", "cannot be fetched from the Hugging Face hub: .*pass the path of a directory"),
    ],
)
def test_what_the_hub_answers_is_explained(hub, tmp_path, status, code, told):
    hub.statuses[f"/api/models/{REPO}/revision/main"] = (status, {"X-Error-Code": code} if code else {})
    with pytest.raises(ModelError, match=f"(?s){told}"):
        fetch(hub, tmp_path)


def test_without_network_it_says_what_else_can_be_done(tmp_path):
    with pytest.raises(ModelError, match=r"(?s)when the network is back.*path of a directory or \.gguf file"):
        fetch_hub(REPO, "main", tmp_path, lambda *_: None, endpoint="http://127.0.0.1:1")


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'megakernel\[hub\]'"):
        fetch_hub(REPO, "main", tmp_path, lambda *_: None)
