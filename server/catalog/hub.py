"""Models of the Hugging Face hub, by its own client library (the extra `hub`).

Must not know: models' formats. Weights as safetensors, JSON and templates are fetched; no code, no pickles.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

from filelock import FileLock

from megakernel_runtime.interface import Progress
from server.errors import ModelError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*", "runs/*"]


def hub_snapshot(repo: str, revision: str, cache_dir: Path) -> Path | None:
    """Return the directory of a repository that was fetched whole before, without using the network."""
    note = _note(repo, revision, cache_dir)
    if not note.is_file():
        return None
    path = Path(note.read_text(encoding="utf-8"))
    return path if (path / "config.json").is_file() else None


def fetch_hub(repo: str, revision: str, cache_dir: Path, progress: Progress, endpoint: str | None = None) -> Path:
    """Return the directory of a repository, fetched if it is not here yet. Raises ModelError with a remedy.

    endpoint: another server than the library's own, which HF_ENDPOINT sets too.
    """
    if (held := hub_snapshot(repo, revision, cache_dir)) is not None:
        return held
    note = _note(repo, revision, cache_dir)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(note.with_suffix(".lock")):
            path = _snapshot(repo, revision, note.parent, progress, endpoint)
            fresh = note.with_suffix(".new")
            fresh.write_text(path, encoding="utf-8")
            fresh.replace(note)
    except ImportError:
        raise ModelError(
            f"{repo} lies on the Hugging Face hub, which needs `pip install 'megakernel[hub]'`; or pass the path of a "
            f"directory or .gguf file that is on this machine"
        ) from None
    except Exception as error:
        raise ModelError(_explained(repo, error)) from error
    return Path(path)


def _note(repo: str, revision: str, cache_dir: Path) -> Path:
    """Return the file that says where a repository lies, written once all of it is there."""
    return cache_dir / "hub" / f"{repo.replace('/', '--')}@{revision.replace('/', '--')}.path"


def _snapshot(repo: str, revision: str, cache_dir: Path, progress: Progress, endpoint: str | None) -> str:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.utils import tqdm

    phase = f"fetching {repo}"

    class Bar(tqdm):
        """The library's progress bar, shown by `progress` and not on the terminal. Counts bytes, else it is silent."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})  # pyright: ignore[reportUnknownMemberType]

        def update(self, n: float | None = 1) -> Any:
            shown = cast("Any", super().update(n))  # pyright: ignore[reportUnknownMemberType]
            if self.counts_bytes:
                progress(phase, int(self.n), int(self.total or 0))
            return shown

    progress(phase, 0, 0)
    return snapshot_download(
        repo,
        revision=revision,
        cache_dir=cache_dir,
        allow_patterns=_WANTED,
        ignore_patterns=_UNWANTED,
        tqdm_class=Bar,
        endpoint=endpoint,
    )


def _explained(repo: str, error: Exception) -> str:
    """Return what went wrong and what to do. Errors are told by name: the library moves their classes about."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"{repo} is gated: accept its licence on the hub's page of the model, then set HF_TOKEN to a token of that "
            f"account"
        )
    if "RepositoryNotFoundError" in kinds:
        return f"the hub has no model {repo} that may be read without a token; check the name, or set HF_TOKEN"
    if "RevisionNotFoundError" in kinds:
        return f"{repo} has no such revision"
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"{repo} cannot be fetched from the Hugging Face hub: {reason}. Try again when the network is back (it "
        f"resumes), or pass the path of a directory or .gguf file that is on this machine"
    )
