"""The acceptor: takes connections off the system's queue at once, and begins each when there is time for it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .connections import Connections

log = logging.getLogger(__name__)

ACCEPT_AT_ONCE = 256
"""Connections taken off the queue before others have their turn on the event loop."""

REPLACED_AT_ONCE = 64
"""How many of them may take the places of others, whose descriptors are free one turn later."""

BEGIN_AT_ONCE = 16
"""Connections begun before others have their turn."""

RETRY_SECONDS = 0.25
"""After how long a lack of descriptors is looked at again."""

LOG_SECONDS = 10.0


class Acceptor:
    """Accepts a listener's connections on the running event loop.

    Where more come than can be begun at once, the latest is begun first: its client still waits. Of those for which
    there is no place the ones are closed whose request has not come, then the oldest. So a flood delays new clients by
    a few turns of the loop, not by its size.
    """

    def __init__(self, listener: socket.socket, make: Callable[[], asyncio.Protocol], connections: Connections) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make = make
        self._connections = connections
        self._accepted: deque[socket.socket] = deque()
        self._begins: set[asyncio.Task] = set()
        self._turn: asyncio.Handle | None = None
        self._closed = False
        self._told_error = 0.0
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def close(self) -> None:
        """Accept no more. The listener stays open; it is its owner's."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener)
        if self._turn is not None:
            self._turn.cancel()
        while self._accepted:
            self._accepted.pop().close()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""

    def on_lack(self, error: object) -> None:
        """The system had no descriptor for a connection: make some free."""
        closed = self._connections.make_room()
        if (now := time.monotonic()) >= self._told_error:
            self._told_error = now + LOG_SECONDS
            log.error("a connection could not be accepted: %s; closing %d others", error, closed)

    def _accept(self) -> None:
        room = self._connections.limits.count - len(self._connections) - len(self._begins)
        replaced, sifted = 0, False
        for _ in range(ACCEPT_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                self.on_lack(error)
                self._loop.remove_reader(self._listener)  # or it would be ready all the time
                self._loop.call_later(RETRY_SECONDS, self._again)
                break
            accepted.setblocking(False)
            self._accepted.append(accepted)
            if len(self._accepted) > room + replaced and replaced < REPLACED_AT_ONCE:
                replaced += self._connections.make_room()
            if len(self._accepted) > room + replaced and not sifted:
                sifted = True
                self._close_silent()
            if len(self._accepted) > room + replaced:
                self._accepted.popleft().close()
        if self._turn is None and self._accepted:
            self._begin()

    def _close_silent(self) -> None:
        """Close those whose request has not come."""
        kept: deque[socket.socket] = deque()
        for accepted in self._accepted:
            if _has_spoken(accepted):
                kept.append(accepted)
            else:
                accepted.close()
        self._accepted = kept

    def _again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _begin(self) -> None:
        self._turn = None
        for _ in range(min(BEGIN_AT_ONCE, len(self._accepted))):
            accepted = self._accepted.pop()
            task = self._loop.create_task(self._begin_one(accepted))
            self._begins.add(task)
            task.add_done_callback(self._begins.discard)
        if self._accepted:
            self._turn = self._loop.call_later(0, self._begin)

    async def _begin_one(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted)
        except OSError:
            accepted.close()  # its client left meanwhile


def _has_spoken(accepted: socket.socket) -> bool:
    """True if a request's head has come."""
    try:
        return b"\r\n\r\n" in accepted.recv(16 << 10, socket.MSG_PEEK)
    except OSError:
        return False
