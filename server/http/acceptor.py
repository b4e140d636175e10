"""The acceptor: accepts connections, and starts each one once it has a request's head."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from .accepted import Accepted
from .connections import Connections
from .unix_socket import ADDRESS

ACCEPT_AT_ONCE = 512
"""Connections accepted in one callback of the event loop; accepting takes a tenth of the time of starting.

Never more than half of the allowed connections, so a connection can be started before a later one replaces it.
"""

BEGIN_AT_ONCE = 8
"""Connections started in one callback of the event loop."""

LACK_SECONDS = 0.02
"""Seconds without accepting when all connections are in use, or no descriptor is free."""


class Acceptor:
    """Accepts connections on the running event loop.

    Starting a connection takes ten times as long as accepting it. When several are ready, whole requests come before
    partial ones; then the shortest, which are the least work; then the latest, whose client is most likely still there.
    """

    def __init__(
        self, listeners: Iterable[socket.socket], make: Callable[[Accepted], asyncio.Protocol], connections: Connections
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._make = make
        self._connections = connections
        self._at_once = max(1, min(ACCEPT_AT_ONCE, connections.count // 2))
        self._ready: list[tuple[bool, int, int, Accepted]] = []  # a heap; closed connections are skipped
        self._count = 0
        self._turn: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task] = set()
        self._listeners = list(listeners)
        for listener in self._listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Accept no more connections. The listeners stay open; their owner closes them."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(self._at_once):
            if self._connections.is_full:
                self._pause(listener)
                return
            try:
                client, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._connections.make_room()
                self._pause(listener)
                return
            client.setblocking(False)
            one = Accepted(client, address[0] if isinstance(address, tuple) else ADDRESS)
            if self._connections.add(one) and not self._read(one):
                self._loop.add_reader(one.descriptor, self._read, one)

    def _pause(self, listener: socket.socket) -> None:
        self._loop.remove_reader(listener)  # otherwise it would be ready all the time
        self._loop.call_later(LACK_SECONDS, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _read(self, one: Accepted) -> bool:
        """Read the received bytes. True if this connection needs no more reading here."""
        try:
            can_begin = one.read()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            can_begin, one.data = True, bytearray()
        if not can_begin:
            return False
        if one.data:
            self._count -= 1
            heappush(self._ready, (not one.is_whole, len(one.data), self._count, one))
            self._turn = self._turn or self._loop.call_soon(self._begin)
        else:  # its client has left
            self._connections.close(one)
        return True

    def _begin(self) -> None:
        self._turn, room = None, BEGIN_AT_ONCE
        while room and self._ready:
            *_, one = heappop(self._ready)
            if not one.begun:
                one.begun, room = True, room - 1
                self._connections.note(one)
                self._loop.remove_reader(one.descriptor)
                task = self._loop.create_task(self._begin_one(one))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if self._ready:
            self._turn = self._loop.call_soon(self._begin)

    async def _begin_one(self, one: Accepted) -> None:
        try:
            _, connection = await self._loop.connect_accepted_socket(lambda: self._make(one), one.socket)
        except OSError:  # its client has left meanwhile
            self._connections.close(one)
        else:  # the transport closes it from now on
            connection.data_received(bytes(one.data))
