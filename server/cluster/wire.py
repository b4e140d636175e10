"""Frames between the processes of a cluster: msgpack after a header of 11 bytes, sans I/O.

A frame is `magic (2), version (1), sequence (4), length (4)`, big-endian, and `length` bytes of one msgpack array
`[kind, field, …]`. Sequence numbers count a direction's frames from 0, so replayed or reordered frames are noticed.
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

MAX_FILES = MAX_BYTES // 2
"""Bytes of a request's images, which are in one frame with its prompt."""

_HEADER = struct.Struct(">2sBII")
_SEQUENCES = 1 << 32


class WireError(ConnectionError):
    """The peer violated the protocol; nothing more can be read from its connection."""


class NotAFrame(WireError):
    """The bytes are not the beginning of a frame."""


class OtherVersion(WireError):
    """The frame has a version of the protocol that this process does not read."""


class FrameTooLarge(WireError):
    """The frame is larger than the reader, or the writer, allows."""


class OutOfOrder(WireError):
    """The frame was replayed or reordered, or an earlier one is missing."""


class Malformed(WireError):
    """The frame's payload is not msgpack, or does not fit its kind."""


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
        """The next frame's bytes. Raises FrameTooLarge, without counting it; TypeError for other values."""
        payload = self._pack((kind, *fields))
        if len(payload) > self._max_bytes:
            raise FrameTooLarge(f"can't send a frame {kind} of {len(payload)} bytes; the limit is {self._max_bytes}")
        head = _HEADER.pack(MAGIC, VERSION, self._sequence, len(payload))
        self._sequence = (self._sequence + 1) % _SEQUENCES
        return head + payload


class FrameReader:
    """Reads the frames of one direction of one connection. After an error it stays at the bad frame.

    kinds: kinds that the connection carries. max_bytes: limit of a payload; it may be raised once the peer is known.
    The buffer holds at most one frame of this size and the last bytes given to `feed`.
    """

    def __init__(self, kinds: Collection[str], max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._kinds = frozenset(kinds)
        self._sequence = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take received bytes; read all frames with `next_frame` before the next call."""
        self._buffer += data

    def next_frame(self) -> Frame | None:
        """The next frame; None until all of it has arrived. Raises a WireError for an invalid one."""
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
            raise OutOfOrder(f"frame {sequence} came instead of frame {self._sequence}")
        end = _HEADER.size + length
        if len(buffer) < end:
            return None
        frame = self._unpack(bytes(memoryview(buffer)[_HEADER.size : end]))
        del buffer[:end]
        self._sequence = (self._sequence + 1) % _SEQUENCES
        return frame

    def close(self) -> None:
        """The connection has ended. Raises Truncated if it ended within a frame."""
        if self._buffer:
            raise Truncated(f"the connection ended {len(self._buffer)} bytes into a frame")

    def _unpack(self, payload: bytes) -> Frame:
        try:
            data = msgpack.unpackb(payload, ext_hook=_no_extensions, strict_map_key=False)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise Malformed(f"a frame's payload can't be read: {error}") from None
        if not isinstance(data, list) or not data or not isinstance(data[0], str):
            raise Malformed("a frame's payload must be a list that begins with its kind")
        kind = data.pop(0)
        if kind not in self._kinds:
            raise UnknownKind(f"the peer sends frames of kind {kind[:32]!r}, which this connection does not carry")
        return Frame(kind, data)


def _no_extensions(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")
