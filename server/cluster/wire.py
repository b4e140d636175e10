"""Frames between the processes of a cluster: msgpack behind a header of 11 bytes, sans I/O.

A frame is `magic (2), version (1), sequence (4), length (4)`, big-endian, and `length` bytes of one msgpack array
`[kind, field, …]`. Sequences count a direction's frames from 0, so that a replayed or a reordered frame is noticed.
There is no pickle and no msgpack extension type: a frame holds None, booleans, numbers, strings, bytes, lists and maps.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any, NamedTuple

import msgpack

MAGIC = b"CW"
VERSION = 2

MAX_BYTES = 64 << 20
"""Largest payload: prompt log-probabilities of a long prompt, with 20 alternatives each, take half of it."""

_HEADER = struct.Struct(">2sBII")
_SEQUENCES = 1 << 32


class WireError(ConnectionError):
    """The peer did not keep to the protocol; nothing more can be read from its connection."""


class NotAFrame(WireError):
    """The bytes are no frame's beginning."""


class OtherVersion(WireError):
    """The frame is of a version of the protocol that this process does not read."""


class FrameTooLarge(WireError):
    """The frame is larger than the reader, or the writer, allows."""


class OutOfOrder(WireError):
    """The frame was replayed, or came before another one that was sent earlier, or one is missing."""


class Malformed(WireError):
    """The frame's payload is not msgpack, or not what its kind has."""


class UnknownKind(WireError):
    """The frame is of a kind that this connection does not carry."""


class Truncated(WireError):
    """The connection ended within a frame."""


class Frame(NamedTuple):
    """One message: its kind and its fields."""

    kind: str
    fields: list[Any]


class FrameWriter:
    """Makes the frames of one direction of one connection, in order."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._sequence = 0
        self._pack = msgpack.Packer(autoreset=True).pack

    def frame(self, kind: str, *fields: Any) -> bytes:
        """The next frame's bytes. FrameTooLarge, and nothing is counted; TypeError for what msgpack can't hold."""
        payload = self._pack((kind, *fields))
        if len(payload) > self._max_bytes:
            raise FrameTooLarge(f"a frame {kind} of {len(payload)} bytes is to be sent; the limit is {self._max_bytes}")
        head = _HEADER.pack(MAGIC, VERSION, self._sequence, len(payload))
        self._sequence = (self._sequence + 1) % _SEQUENCES
        return head + payload


class FrameReader:
    """Reads the frames of one direction of one connection. After an error it stays at the bad frame.

    kinds: kinds that the connection carries. max_bytes: of a payload; it may be raised once the peer is known, and no
    more than one frame of this size, and what `feed` was given last, is held.
    """

    def __init__(self, kinds: Collection[str], max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._kinds = frozenset(kinds)
        self._sequence = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes that came; read all frames with `next_frame` before the next call."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """The next frame, None until all of it has come. Raises the WireError that says what is wrong with it."""
        buffer = self._buffer
        if len(buffer) < _HEADER.size:
            if buffer[:2] != MAGIC[: len(buffer)]:
                raise NotAFrame("the peer does not send Chorus frames")
            return None
        magic, version, sequence, length = _HEADER.unpack_from(buffer)
        if magic != MAGIC:
            raise NotAFrame("the peer does not send Chorus frames")
        if version != VERSION:
            raise OtherVersion(f"the peer's frames are of version {version}, this process reads {VERSION}")
        if length > self.max_bytes:
            raise FrameTooLarge(f"the peer sends a frame of {length} bytes; the limit is {self.max_bytes}")
        if sequence != self._sequence:
            raise OutOfOrder(f"frame {sequence} came where frame {self._sequence} was to come")
        end = _HEADER.size + length
        if len(buffer) < end:
            return None
        frame = self._unpack(bytes(memoryview(buffer)[_HEADER.size : end]))
        del buffer[:end]
        self._sequence = (self._sequence + 1) % _SEQUENCES
        return frame

    def close(self) -> None:
        """The connection has ended. Truncated if that was within a frame."""
        if self._buffer:
            raise Truncated(f"the connection ended {len(self._buffer)} bytes into a frame")

    def _unpack(self, payload: bytes) -> Frame:
        try:
            data = msgpack.unpackb(payload, ext_hook=_no_extensions, strict_map_key=False)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise Malformed(f"a frame's payload can't be read: {error}") from None
        if not isinstance(data, list) or not data or not isinstance(data[0], str):
            raise Malformed("a frame's payload is no list that begins with its kind")
        kind = data.pop(0)
        if kind not in self._kinds:
            raise UnknownKind(f"the peer sends frames of kind {kind[:32]!r}, which are not carried here")
        return Frame(kind, data)


def _no_extensions(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not carried")
