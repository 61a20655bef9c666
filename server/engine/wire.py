"""Frames on the socket: four bytes of length, little endian, then one message in MessagePack. Both directions.

Knows bytes and message types, and the translation of sampling parameters. Must not know: sockets, requests' lives.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from megakernel_runtime.interface import SamplingParams
from server.engine.messages import ApiToEngine, EngineToApi, WireSampling

MAX_FRAME_BYTES = 64 * 1024 * 1024  # a prompt of a million tokens is 5 MB

_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

Message = TypeVar("Message")


class FrameError(Exception):
    """The bytes on a connection are no frames of ours; nothing after them can be trusted."""


def encode(message: EngineToApi | ApiToEngine, into: bytearray) -> None:
    """Append a message's frame to `into`."""
    payload = _ENCODER.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(payload)} bytes; {MAX_FRAME_BYTES} may be sent")
    into += _LENGTH.pack(len(payload))
    into += payload


class FrameReader(Generic[Message]):
    """Messages out of bytes that arrive in any pieces."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes. Raises FrameError, after which the reader is of no use."""
        self._buffer += data
        messages: list[Message] = []
        start, have = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while have - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"a frame of {length} bytes is announced; {MAX_FRAME_BYTES} may be sent")
                end = start + _LENGTH.size + length
                if end > have:
                    break
                with view[start + _LENGTH.size : end] as payload:
                    messages.append(self._decode(payload))
                start = end
        del self._buffer[:start]
        return messages

    def _decode(self, payload: memoryview) -> Message:
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"a frame cannot be decoded: {error}") from None


def engine_reader() -> FrameReader[ApiToEngine]:
    """Return a reader for the engine's end."""
    return FrameReader(msgspec.msgpack.Decoder[ApiToEngine](ApiToEngine))


def api_reader() -> FrameReader[EngineToApi]:
    """Return a reader for the API's end."""
    return FrameReader(msgspec.msgpack.Decoder[EngineToApi](EngineToApi))


_SAMPLING_FIELDS = WireSampling.__struct_fields__


def sampling_of(wire: WireSampling) -> SamplingParams:
    """Return the runtime's sampling parameters that a message carries."""
    return SamplingParams(*(getattr(wire, name) for name in _SAMPLING_FIELDS))


def wire_of(sampling: SamplingParams) -> WireSampling:
    """Return the message form of sampling parameters."""
    return WireSampling(*(getattr(sampling, name) for name in _SAMPLING_FIELDS))
