"""The metadata of GGUF files: what was written is read, and no damaged file is taken for a good one."""

import struct

import pytest

from server.errors import ModelError
from server.text.gguf_metadata import read_metadata
from tests.unit.text.tokenizers_of import write_gguf


def header(n_pairs, *, magic=b"GGUF", version=3):
    return magic + struct.pack("<IQQ", version, 0, n_pairs)


def pair(key, kind, value):
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


@pytest.fixture
def read(tmp_path):
    def run(data, prefixes=("",)):
        (tmp_path / "m.gguf").write_bytes(data)
        return read_metadata(tmp_path / "m.gguf", prefixes)

    return run


def test_what_gguf_s_own_writer_wrote_is_read(tmp_path):
    more = {"a.text": "é", "a.int": 7, "a.yes": True, "a.real": 0.5, "a.ints": [1, 2], "a.texts": ["x", ""], "b": 1}
    path = write_gguf(tmp_path / "m.gguf", {}, **more)
    assert read_metadata(path, ("a.",)) == {k: v for k, v in more.items() if k.startswith("a.")}


@pytest.mark.parametrize(
    ("kind", "code", "value"),
    [(0, "B", 200), (1, "b", -5), (2, "H", 60000), (3, "h", -300), (4, "I", 2**32 - 1), (5, "i", -7), (6, "f", 0.25),
     (7, "?", True), (10, "Q", 2**63), (11, "q", -(2**62)), (12, "d", 0.1)],
)  # fmt: skip
def test_every_kind_of_number(read, kind, code, value):
    assert read(header(1) + pair("k", kind, struct.pack("<" + code, value))) == {"k": value}


@pytest.mark.parametrize("version", [2, 3])
def test_versions(read, version):
    assert read(header(0, version=version)) == {}


def test_what_is_not_wanted_is_passed_over_unread(read):
    text = struct.pack("<Q", 2) + b"\xff\xff"
    texts = struct.pack("<IQ", 8, 2) + text + text
    data = header(4) + pair("x", 8, text) + pair("y", 9, texts) + pair("z", 4, bytes(4)) + pair("k", 0, b"\x01")
    assert read(data, ("k",)) == {"k": 1}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "cannot mmap an empty file"),
        (b"GGML" + bytes(100), "not a GGUF file"),
        (header(0, version=1), "GGUF version 1 is not supported; versions 2 and 3 are"),
        (header(2**40), "1099511627776 metadata pairs; the limit is 131072"),
        (header(1) + pair("k", 13, bytes(8)), "value type 13 at byte .* is not supported"),
        (header(1) + pair("k", 9, struct.pack("<IQ", 9, 1) + bytes(100)), "value type 9"),
        (header(1) + pair("k", 8, struct.pack("<Q", 2**60)), "ends before: it is truncated"),
        (header(1) + pair("k", 9, struct.pack("<IQ", 8, 2**60)), "ends beyond the file: it is truncated"),
        (header(1) + pair("k", 9, struct.pack("<IQ", 4, 2**60)), "ends before: it is truncated"),
        (header(1) + pair("k", 8, struct.pack("<Q", 1) + b"\xff"), "invalid start byte"),
    ],
)
def test_damaged_files_are_refused_by_name(read, tmp_path, data, told):
    with pytest.raises(ModelError, match=told) as caught:
        read(data)
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_a_file_cut_anywhere_is_refused(read, tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", {}, a="text", b=[1, 2], c=["x", "y"]).read_bytes()
    end = whole.rindex(b"y") + 1
    assert read(whole[:end])["c"] == ["x", "y"]
    for size in range(end):
        with pytest.raises(ModelError):
            read(whole[:size])


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        read_metadata(tmp_path / "m.gguf", ())
