"""A connection that is accepted, and not begun yet."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from typing import Protocol

MAX_HEAD_BYTES = 64 << 10
"""Bytes of a request's line and headers, and of anything between two parts of its body."""

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)


class Limits(Protocol):
    """How long clients may keep the server waiting; its settings."""

    head_seconds: float
    body_seconds: float
    whole_body_seconds: float
    body_bytes_per_second: int


class Accepted:
    """A connection that is not begun yet: a socket, and what was read from it."""

    def __init__(self, client: socket.socket, address: str) -> None:
        self.socket = client
        self.descriptor = client.fileno()  # asyncio is slow to look sockets up
        self.address = address
        self.place: str | None = None
        self.data = bytearray()
        self.begun = False
        self.is_whole = False
        """True if one request has come as a whole, and nothing else."""
        self._since = time.monotonic()

    def read(self) -> bool:
        """Read what has come. True if it can be begun: a request's head is there, or nothing more will come."""
        data = self.socket.recv(MAX_HEAD_BYTES)
        self.data += data
        head = self.data.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self.data, 0, head)
        self.is_whole = head >= 4 and len(self.data) == head + (int(length[1]) if length else 0)
        return head >= 4 or not data or len(self.data) >= MAX_HEAD_BYTES

    @property
    def waits(self) -> bool:
        """True while another connection may take this one's place."""
        return not self.begun

    @property
    def answers(self) -> bool:
        return self.is_whole

    def close(self) -> None:
        self.begun = True
        asyncio.get_running_loop().remove_reader(self.descriptor)
        self.socket.close()

    def expire(self) -> bool:
        """End it: nothing of a request has come that could be answered."""
        return True

    def is_overdue(self, now: float, limits: Limits) -> bool:
        return now - self._since > limits.head_seconds
