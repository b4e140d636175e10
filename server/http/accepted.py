"""Accepted connections whose request head has not arrived yet."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from typing import Protocol

from .unix_socket import Descriptors

MAX_HEAD_BYTES = 64 << 10
"""Bytes of a request's line and headers, and of anything between two parts of its body."""

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)


class Limits(Protocol):
    """Limits on how long clients may keep the server waiting, from the settings."""

    head_seconds: float
    body_seconds: float
    whole_body_seconds: float
    body_bytes_per_second: int


class Accepted:
    """An accepted connection before its first request: the socket, and the bytes read from it."""

    def __init__(self, client: socket.socket, address: str) -> None:
        self.socket = client
        self.descriptor = client.fileno()  # asyncio looks sockets up slowly
        self.address = address
        self.network: str | None = None
        self.descriptors = Descriptors() if client.family == socket.AF_UNIX else None
        self.data = bytearray()
        self.begun = False
        self.is_whole = False
        """True if exactly one complete request has arrived."""
        self._since = time.monotonic()

    def read(self) -> bool:
        """Read the received bytes. True if the connection can start: it has a request's head, or nothing more comes."""
        if self.descriptors is None:
            data = self.socket.recv(MAX_HEAD_BYTES)
        else:
            data = self.descriptors.receive(self.socket, MAX_HEAD_BYTES)
        self.data += data
        head = self.data.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self.data, 0, head)
        self.is_whole = head >= 4 and len(self.data) == head + (int(length[1]) if length else 0)
        return head >= 4 or not data or len(self.data) >= MAX_HEAD_BYTES

    @property
    def waits(self) -> bool:
        """True while another connection may replace this one."""
        return not self.begun

    @property
    def answers(self) -> bool:
        return self.is_whole

    def close(self) -> None:
        self.begun = True
        asyncio.get_running_loop().remove_reader(self.descriptor)
        self.socket.close()
        if self.descriptors is not None:
            self.descriptors.close()

    def expire(self) -> bool:
        """Close it: no part of a request has come that could be answered."""
        return True

    def is_overdue(self, now: float, limits: Limits) -> bool:
        return now - self._since > limits.head_seconds
