"""Files over HTTP: whole, resumed, retried, and refused when they are not what they should be."""

import random

import httpx
import pytest

from server.catalog.download import DownloadFault, WrongContent, check_sha256, check_space, download
from tests.unit.catalog.conftest import sha256

N_BYTES = 200_000
DATA = random.Random(1).randbytes(N_BYTES)


@pytest.fixture
def fetch(site, tmp_path):
    """Fetch /file; return what was told as progress. The file is at fetch.part."""
    url = site.put("/file", DATA)

    def run(n_bytes=N_BYTES):
        told = []
        with httpx.Client(trust_env=False, timeout=10) as client:
            download(client, url, run.part, n_bytes, lambda done, total: told.append((done, total)))
        return told

    run.part = tmp_path / "file.part"
    return run


def test_a_file_comes_whole_and_progress_is_told(fetch):
    told = fetch()
    assert fetch.part.read_bytes() == DATA
    assert told[-1] == (len(DATA), len(DATA))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_what_is_there_already_is_not_asked_for_again(fetch, site):
    fetch.part.write_bytes(DATA[:150_000])
    fetch()
    assert fetch.part.read_bytes() == DATA
    assert site.asked == [("/file", "bytes=150000-")]


def test_a_whole_file_needs_no_server(fetch, site):
    fetch.part.write_bytes(DATA)
    assert fetch() == [(len(DATA), len(DATA))]
    assert site.asked == []


def test_a_broken_connection_is_taken_up_where_it_broke(fetch, site):
    site.cuts = [50_000, 30_000]
    fetch()
    assert fetch.part.read_bytes() == DATA
    assert site.asked_for("/file") == [None, "bytes=50000-", "bytes=80000-"]


def test_more_breaks_than_attempts_are_survived_while_there_is_progress(fetch, site):
    site.cuts = [20_000] * 8
    fetch()
    assert fetch.part.read_bytes() == DATA


def test_without_progress_it_gives_up_and_keeps_what_came(fetch, site):
    site.cuts = [50_000, 0, 0, 0, 0, 0]
    with pytest.raises(DownloadFault, match="50000 of 200000 bytes"):
        fetch()
    assert fetch.part.read_bytes() == DATA[:50_000]
    assert len(site.asked) == 5


def test_a_server_that_knows_no_ranges_sends_all_again(fetch, site):
    site.ranges = False
    fetch.part.write_bytes(DATA[:150_000])
    fetch()
    assert fetch.part.read_bytes() == DATA


def test_more_than_there_should_be_is_begun_anew(fetch):
    fetch.part.write_bytes(DATA + b"more")
    fetch()
    assert fetch.part.read_bytes() == DATA


def test_a_file_that_is_too_long_is_refused(fetch):
    with pytest.raises(WrongContent, match="longer than the 100000 bytes"):
        fetch(n_bytes=100_000)


def test_a_file_that_is_too_short_is_a_fault(fetch):
    """The server has nothing from where the file ends: status 416."""
    with pytest.raises(DownloadFault, match="416 after 200000 of 200001"):
        fetch(n_bytes=len(DATA) + 1)


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_an_error_is_told_by_its_status(fetch, site, status):
    site.statuses["/file"] = (status, {})
    with pytest.raises(DownloadFault, match=f"status {status}"):
        fetch()
    assert not fetch.part.exists()


def test_another_range_than_was_asked_for_is_refused(fetch, site):
    fetch.part.write_bytes(DATA[:100])
    site.statuses["/file"] = (206, {"Content-Range": f"bytes 0-1/{len(DATA)}"})
    with pytest.raises(DownloadFault, match="status 206"):
        fetch()
    assert fetch.part.read_bytes() == DATA[:100]


def test_no_server_is_a_fault(tmp_path):
    with httpx.Client(trust_env=False) as client, pytest.raises(DownloadFault, match="ConnectError after 0 of 10"):
        download(client, "http://127.0.0.1:1/file", tmp_path / "part", 10, lambda *_: None)


def test_checksums(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    check_sha256(path, sha256(DATA))
    with pytest.raises(WrongContent, match=f"{sha256(DATA)}, expected 0123"):
        check_sha256(path, "0123")


def test_room_on_the_disk(tmp_path):
    check_space(tmp_path, 1)
    with pytest.raises(OSError, match=r"1000000000000 MB are needed, \d+ MB are free"):
        check_space(tmp_path, 10**18)
