"""The acceptor: takes connections off the system's queue while there are places, and begins each in its turn."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from .connections import RESPITE_SECONDS

if TYPE_CHECKING:
    from .connections import Connections
    from .http_protocol import HttpConnection

log = logging.getLogger(__name__)

ACCEPT_AT_ONCE = 512
"""Connections taken off the queue before others have their turn on the event loop."""

REPLACED_AT_ONCE = 64
"""Number of them that may take the places of others, whose descriptors are free one turn later."""

BEGIN_AT_ONCE = 16
"""Connections begun before others have their turn."""

FULL_SECONDS = 0.01
"""After how long it is looked again for a place, when there is none."""

RETRY_SECONDS = 0.25
"""After how long a lack of descriptors is looked at again."""

LOG_SECONDS = 10.0

PEEK_BYTES = 16 << 10
"""Bytes of a request that are looked at before its connection is begun."""

_LAST_DATA_RECEIVED = 52
"""Offset in Linux' `struct tcp_info` of the milliseconds since data came last, or since the connection was made."""

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)


class Asked(IntEnum):
    """State of what a client has sent before its connection is begun, from what is begun last to what is begun first.

    Who sends several requests at once does not wait for the first answer; and to look takes less time than to work.
    """

    NOTHING = 0
    PART = 1
    SEVERAL = 2
    WORK = 3
    LOOK = 4


class Accepted:
    """A connection that is not begun yet. since: since when, on the monotonic clock, its client had been silent."""

    __slots__ = ("asked", "place", "since", "socket")

    def __init__(self, accepted: socket.socket, place: str | None, since: float) -> None:
        self.socket = accepted
        self.place = place
        self.since = since
        self.asked = Asked.NOTHING

    def look(self) -> Asked:
        """State of what has come by now."""
        if self.asked <= Asked.PART:
            try:
                self.asked = _asked(self.socket)
            except OSError:
                self.asked = Asked.NOTHING
        return self.asked


class Acceptor:
    """Accepts a listener's connections on the running event loop.

    Where more come than can be begun at once, those whose request has come are begun first, of these the latest: its
    client still waits. When all places are taken, those are given up that ask for nothing, the oldest first; where all
    ask, the next have to wait in the system's queue until one has its answer.
    """

    def __init__(self, listener: socket.socket, make: Callable[[], HttpConnection], connections: Connections) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make = make
        self._connections = connections
        self._places = connections.places
        self._accepted: list[Accepted] = []
        self._begins: set[asyncio.Task] = set()
        self._turn: asyncio.Handle | None = None
        self._closed = False
        self._told_error = 0.0
        self._full_places: set[str | None] = set()
        """Places that were found this turn to have all that they may, none of which can be given up."""
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more. The listener stays open; it is its owner's."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener)
        if self._turn is not None:
            self._turn.cancel()
        while self._accepted:
            self._close(self._accepted.pop())

    def on_lack(self, error: object) -> None:
        """The system had no descriptor for a connection: make some free."""
        closed = self._connections.make_room()
        if (now := time.monotonic()) >= self._told_error:
            self._told_error = now + LOG_SECONDS
            log.error("a connection could not be accepted: %s; closing %d others", error, closed)

    def _accept(self) -> None:
        now = time.monotonic()
        room = self._connections.limits.count - len(self._connections) - len(self._begins) - len(self._accepted)
        replaced = 0
        self._full_places.clear()
        for _ in range(ACCEPT_AT_ONCE):
            if room <= 0 and replaced < REPLACED_AT_ONCE:
                closed = self._connections.make_room()
                room, replaced = room + closed, replaced + closed
            if room <= 0:
                room += self._give_up_some(now)
            if room <= 0:
                self._pause(FULL_SECONDS)
                break
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                self.on_lack(error)
                self._pause(RETRY_SECONDS)
                break
            accepted.setblocking(False)
            one = Accepted(accepted, self._places.enter(address[0]), now - _silent_seconds(accepted))
            room -= self._take(one, now)
        if self._turn is None and self._accepted:
            self._begin()

    def _take(self, one: Accepted, now: float) -> bool:
        """Have a connection begun in its turn; False if it was closed, as no more may come from its place."""
        if self._places.is_over(one.place) and (
            one.place in self._full_places
            or not (self._connections.make_room(one.place) or self._give_up_some(now, one.place))
        ):
            self._full_places.add(one.place)
            self._connections.refused("their address had too many")
            self._close(one)
            return False
        self._accepted.append(one)
        return True

    def _close(self, one: Accepted) -> None:
        one.socket.close()
        self._places.leave(one.place)

    def _pause(self, seconds: float) -> None:
        """Accept nothing for a while."""
        self._loop.remove_reader(self._listener)  # or it would be ready all the time
        self._loop.call_later(seconds, self._again)

    def _again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)
            self._accept()

    def _give_up_some(self, now: float, place: str | None = None) -> int:
        """Close some that had time and yet don't wait for an answer, the oldest first; returns how many."""
        idle = [
            one for one in self._accepted
            if place in (None, one.place) and now - one.since > RESPITE_SECONDS and one.look() <= Asked.SEVERAL
        ]  # fmt: skip
        idle.sort(key=lambda one: (one.asked, one.since))
        chosen = set(idle[: max(1, self._connections.limits.count // 8)])
        for one in chosen:
            self._close(one)
            self._connections.refused("others needed their places")
        self._accepted = [one for one in self._accepted if one not in chosen]
        return len(chosen)

    def _begin(self) -> None:
        self._turn = None
        if len(self._accepted) > BEGIN_AT_ONCE:
            self._accepted.sort(key=lambda one: (one.look(), one.since))
        for _ in range(min(BEGIN_AT_ONCE, len(self._accepted))):
            task = self._loop.create_task(self._begin_one(self._accepted.pop()))
            self._begins.add(task)
            task.add_done_callback(self._begins.discard)
        if self._accepted:
            self._turn = self._loop.call_later(0, self._begin)

    async def _begin_one(self, one: Accepted) -> None:
        connection = self._make()
        connection.place = one.place
        try:
            await self._loop.connect_accepted_socket(lambda: connection, one.socket)
        except OSError:
            self._close(one)  # its client left meanwhile


def _silent_seconds(accepted: socket.socket) -> float:
    """Seconds since its client connected, or said something: in the system's queue it had time to ask, too."""
    if not hasattr(socket, "TCP_INFO"):  # only Linux tells
        return 0.0
    info = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED + 4)
    return struct.unpack_from("I", info, _LAST_DATA_RECEIVED)[0] / 1000


def _asked(accepted: socket.socket) -> Asked:
    """State of what has come, as far as can be seen without reading it."""
    data = accepted.recv(PEEK_BYTES, socket.MSG_PEEK)
    head = data.find(b"\r\n\r\n") + 4
    if head < 4:
        return Asked.NOTHING
    length = _LENGTH.search(data, 0, head)
    wanted = head + (int(length[1]) if length else 0)
    if len(data) < min(wanted, PEEK_BYTES):
        return Asked.PART
    if len(data) > wanted:
        return Asked.SEVERAL
    return Asked.LOOK if data.startswith((b"GET ", b"HEAD ")) else Asked.WORK
