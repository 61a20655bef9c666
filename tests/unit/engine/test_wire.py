"""Frames: what is written is read, in any pieces; what is no frame is refused."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel_runtime.interface import SamplingParams
from server.engine.messages import (
    Cancel,
    Drain,
    Failed,
    Fault,
    Hello,
    LoadFailed,
    Loading,
    Observations,
    Rejected,
    Submit,
    TokenLogprobs,
    Tokens,
    WireSampling,
)
from server.engine.wire import MAX_FRAME_BYTES, FrameError, api_reader, encode, engine_reader, sampling_of, wire_of

TO_ENGINE = (
    Submit("a", (1, 2, 3), WireSampling(logit_bias=((5, 1.5),), top_logprobs=3), 2, -1, "salt", 1.5),
    Cancel("a", 1),
    Cancel("b"),
    Drain(),
)
TO_API = (
    Hello(1, 64, 50, 4, 24, 4, "fake", "none", "none", 0, 0),
    Loading("weights", 1, 2),
    LoadFailed("no"),
    Fault("broken"),
    Tokens("a", 0, (7, 8), (TokenLogprobs(-0.5, ((7, -0.5),)), TokenLogprobs(-1.0)), "stop", 4, 99),
    Rejected("a", "queue_full", "later", 2.0),
    Failed("a", "gone"),
    Observations({"g": 1.0}, {"c": 2.0}, {"s": [0.1, 0.2]}),
)


def frames(messages):
    out = bytearray()
    for message in messages:
        encode(message, out)
    return bytes(out)


def test_sampling_parameters_are_the_same_on_the_wire_field_by_field():
    fields = [(field.name, field.default) for field in dataclasses.fields(SamplingParams)]
    wire = msgspec.structs.fields(WireSampling)
    assert [(field.name, field.default) for field in wire] == fields


def test_sampling_parameters_survive_the_wire():
    sampling = SamplingParams(1.1, 0.2, 0.3, ((1, 2.0),), (3, 4), 0.5, 6, 0.7, 0.08, 2**64 - 1, 5, 2, (9,), 11)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(wire_of(sampling)), type=WireSampling)
    assert sampling_of(decoded) == sampling


@given(st.lists(st.integers(1, 40), max_size=40))
def test_messages_arrive_whole_however_they_are_cut(cuts):
    data, reader, got = frames(TO_API), api_reader(), []
    for size in [*cuts, len(data)]:
        got += reader.feed(data[:size])
        data = data[size:]
    assert tuple(got) == TO_API


def test_both_directions_have_their_own_messages():
    assert tuple(engine_reader().feed(frames(TO_ENGINE))) == TO_ENGINE
    with pytest.raises(FrameError, match="cannot be decoded"):
        engine_reader().feed(frames(TO_API[:1]))


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_refused_or_waits_for_more_but_never_crashes(data):
    reader = engine_reader()
    try:
        messages = reader.feed(data)
    except FrameError:
        return
    assert all(isinstance(message, Submit | Cancel | Drain) for message in messages)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_frame_never_crashes(where, byte):
    data = bytearray(frames(TO_ENGINE))
    data[where % len(data)] = byte
    try:
        messages = engine_reader().feed(bytes(data))
    except FrameError:
        return
    assert len(messages) <= len(TO_ENGINE) + 1


def test_a_frame_beyond_the_bound_is_refused_before_it_is_read():
    with pytest.raises(FrameError, match="announced"):
        engine_reader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_a_message_beyond_the_bound_is_not_sent():
    with pytest.raises(FrameError, match="may be sent"):
        encode(Failed("a", "x" * (MAX_FRAME_BYTES + 1)), bytearray())
