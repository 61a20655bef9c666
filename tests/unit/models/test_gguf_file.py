"""The GGUF container: what llama.cpp's package writes is read; every broken bound is an error in time and memory."""

from __future__ import annotations

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megakernel_runtime.models.gguf_file import BLOCK_TYPES, GgufArray, GgufError, open_gguf


def text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape=(4,), kind=0, offset=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def container(pairs=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, n_tensors=None, n_pairs=None) -> bytes:
    counts = len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def opened(tmp_path, content: bytes):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return open_gguf(path)


def test_block_types_are_ggmls():
    for number, block in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (block.name, block.elements, block.n_bytes)


@pytest.mark.parametrize("alignment", [None, 8, 64])
def test_what_the_package_writes_is_read(tmp_path, alignment):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    scalars = {
        "uint8": 200,
        "int8": -3,
        "uint16": 60000,
        "int16": -300,
        "uint32": 1 << 31,
        "int32": -5,
        "uint64": 1 << 63,
    }
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_int64("a.int64", -(1 << 40))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Grüße")
    writer.add_array("a.strings", ["x", "", "long" * 50])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_string("a.last", "still in step")
    stored = {"one": np.arange(5, dtype=np.float32), "two": np.arange(12, dtype=np.float16).reshape(3, 4)}
    for name, values in stored.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = open_gguf(tmp_path / "x.gguf")
    expected = {f"a.{kind}": value for kind, value in scalars.items()}
    expected |= {"a.int64": -(1 << 40), "a.float32": 0.5, "a.float64": 0.1, "a.bool": True, "a.string": "Grüße"}
    expected |= {"a.strings": GgufArray(3), "a.numbers": GgufArray(3), "a.last": "still in step"}
    assert {key: value for key, value in file.metadata.items() if key.startswith("a.")} == expected
    for name, values in stored.items():
        entry = file.tensors[name]
        assert entry.shape == values.shape
        assert file.data[entry.offset : entry.offset + entry.n_bytes] == values.tobytes()
    assert file.floats("one") == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert file.floats("none") is None


HUGE = struct.pack("<Q", 1 << 63)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "not a GGUF file"),
        (b"GGUF", "truncated"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (container(version=1), "version 1"),
        (container(version=3 << 24), "big endian"),
        (container(n_pairs=1 << 63), "metadata pairs; the limit"),
        (container(n_tensors=1 << 40), "tensors; the limit"),
        (container(n_pairs=9), "truncated"),
        (container([pair("k", 4, b"\1\0\0\0"), pair("k", 4, b"\1\0\0\0")]), "'k' occurs twice"),
        (container([pair("k", 99, b"")]), "'k' has type 99"),
        (container([pair(b"\xff", 4, b"")]), "not UTF-8"),
        (container([pair("k", 8, HUGE)]), "truncated"),
        (container([HUGE]), "a name of"),
        (container([pair("k", 9, struct.pack("<I", 8) + HUGE)]), "strings ends beyond the file"),
        (container([pair("k", 9, struct.pack("<IQ", 8, 1) + HUGE)]), "truncated"),
        (container([pair("k", 9, struct.pack("<I", 4) + HUGE)]), "truncated"),
        (container([pair("k", 9, struct.pack("<IQ", 9, 1))]), "array of values of type 9"),
        (container([pair("general.alignment", 4, struct.pack("<I", 33))]), "general.alignment is 33"),
        (container([pair("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment is 0"),
        (container([pair("general.alignment", 8, text("32"))]), "general.alignment is '32'"),
        (container(tensors=[tensor("t", ())]), "'t' has 0 dimensions"),
        (container(tensors=[tensor("t", (1,) * 5)]), "'t' has 5 dimensions"),
        (container(tensors=[tensor("t", (4, 0))]), "'t' of type F32 has shape"),
        (container(tensors=[tensor("t", (33,), 8)]), "multiples of 32"),
        (container(tensors=[tensor("t", (4,), 10)]), "'t' has ggml type 10; supported: F32"),
        (container(tensors=[tensor("t", (4,), 0, 64)], data=bytes(99)), "'t' lies at data offset 64, expected 0"),
        (container(tensors=[tensor("t", (1 << 62, 1 << 62))]), "'t' ends at byte"),
        (container(tensors=[tensor("t")], data=bytes(15)), "'t' ends at byte"),
        (container(tensors=[tensor("t"), tensor("t", offset=32)], data=bytes(64)), "'t' occurs twice"),
    ],
)
def test_a_broken_file_is_an_error_that_names_file_and_place(tmp_path, content, message):
    with pytest.raises(GgufError, match=message) as error:
        opened(tmp_path, content)
    assert "x.gguf" in str(error.value)


def test_a_directory_and_an_absent_file_are_errors(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(GgufError, match="cannot be read"):
            open_gguf(path)


VALID = container(
    [
        pair("general.alignment", 4, struct.pack("<I", 32)),
        pair("tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("bc") + text("")),
        pair("name", 8, text("x")),
    ],
    [tensor("one", (4,), 0, 0), tensor("two", (32, 2), 3, 32)],
    bytes(32 + 40),
)


@given(content=st.binary(max_size=400) | st.binary(max_size=200).map(lambda tail: VALID[:24] + tail))
@example(content=VALID)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(tmp_path, content):
    check_bounded(tmp_path, content)


@given(position=st.integers(0, len(VALID) - 1), patch=st.binary(min_size=1, max_size=9))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_read_or_refused(tmp_path, position, patch):
    check_bounded(tmp_path, VALID[:position] + patch + VALID[position + len(patch) :])


@pytest.mark.parametrize("length", range(len(VALID)))
def test_any_truncation_is_refused(tmp_path, length):
    with pytest.raises(GgufError):
        opened(tmp_path, VALID[:length])


def check_bounded(tmp_path, content):
    """Opening gives a file whose tensors lie inside it, or GgufError; either takes less than a megabyte."""
    tracemalloc.start()
    try:
        file = opened(tmp_path, content)
        for entry in file.tensors.values():
            assert 0 <= entry.offset <= entry.offset + entry.n_bytes <= len(content)
    except GgufError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1_000_000
