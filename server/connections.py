"""Connections: never more than there are descriptors for, and none for longer than it gets on."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any

from .addresses import Networks, Places

if TYPE_CHECKING:
    from .http_protocol import HttpConnection

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
LOG_SECONDS = 10.0

MIN_BYTES_PER_SECOND = 16 << 10
"""Bytes per second at which a body must come and an answer be taken, once the first seconds of grace are over."""

UNREAD_SECONDS = 2.0
"""Seconds that an answer may lie unread while others need its connection's place."""

RESPITE_SECONDS = 0.02
"""Seconds that a connection has in any case to say what it wants: what was sent with it may not have been read yet."""

FRESH_SECONDS = 1.0
"""Seconds that a connection has, if any older one can be closed in its stead, to say what it wants."""

CROWDED_SECONDS = 30.0
"""For how long, after half of the places were taken last, whatever is slow has a quarter of its time."""

RESERVED_DESCRIPTORS = 128
"""Descriptors kept for all but connections: adapter files, and sockets that are being closed or refused."""

MIN_CONNECTIONS = 16

_AT_ONCE = struct.pack("ii", 1, 0)


class Phase(IntEnum):
    """State of a connection, in the order in which it is given up when there are too many."""

    HEAD = 0
    BODY = 1
    IDLE = 2
    ANSWER = 3


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections: their number, those from one place, and how long each may take.

    head: seconds until a request's head has come. body, send: seconds of grace for a body and for a client that does
    not read, more as bytes go by. idle: seconds between two requests.
    """

    count: int
    per_place: int
    head: float = 10.0
    body: float = 20.0
    send: float = 20.0
    idle: float = 50.0


def max_connections(wanted: int | None = None) -> int:
    """Connections that fit below this process's limit of descriptors: at most `wanted`, never fewer than 16."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted or 1 << 16
    in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    fitting = max(MIN_CONNECTIONS, soft - in_use - RESERVED_DESCRIPTORS)
    if wanted is not None and wanted > fitting:
        log.warning("max_connections is %d, %d descriptors leave room for %d; raise ulimit -n", wanted, soft, fitting)
    return min(wanted or fitting, fitting)


class Connections:
    """All connections of a server. Used on its event loop only.

    Twice a second each is looked at; what has not got on in its time is cut, and a request that it had ends. The times
    are a quarter as long while half of the places are taken, and for a while after. A new connection beyond the limit
    takes the place of the oldest ones that ask for nothing.
    """

    def __init__(self, limits: ConnectionLimits, proxies: Networks) -> None:
        self.limits = limits
        self.places = Places(limits.per_place, proxies)
        self._crowded_limits = replace(limits, head=limits.head / 4, body=limits.body / 4, send=limits.send / 4)
        self._crowded_until = 0.0
        self._all: dict[HttpConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._cut: Counter[str] = Counter()
        self._log_after = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[HttpConnection]:
        return iter(self._all)

    def refused(self, why: str) -> None:
        """A connection was closed before it was begun."""
        self._cut[why] += 1
        self._watch()

    def add(self, connection: HttpConnection) -> None:
        """A connection was begun."""
        self._all[connection] = None
        self._watch()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def remove(self, connection: HttpConnection) -> None:
        """A connection is gone, or about to go."""
        if connection in self._all:
            del self._all[connection]
            self.places.leave(connection.place)

    def make_room(self, place: str | None = None) -> int:
        """Close some of those that ask for nothing, or don't read, the oldest first; returns how many.

        place: where they must come from; None: anywhere.
        """
        now = time.monotonic()
        waiting = [one for one in self._all if place in (None, one.place) and _may_go(one, now)]
        waiting.sort(key=lambda one: (now - one.since < FRESH_SECONDS, one.phase, one.since))
        chosen = [*islice((one for one in waiting if not one.transport.unheard), max(1, self.limits.count // 32))]
        for connection in chosen:
            self._close(connection, "others needed their places")
        return len(chosen)

    @property
    def num_unsent(self) -> int:
        """Connections with an answer of which not all has left."""
        return sum(1 for one in self._all if one.transport.get_write_buffer_size())

    def cut(self, connections: Iterable[HttpConnection] | None = None) -> None:
        """End connections at once, all by default; their requests end, too."""
        for connection in list(self._all if connections is None else connections):
            self.remove(connection)
            transport = connection.transport
            if transport.get_write_buffer_size() or connection.holds or connection.is_unread:
                # Or the system would keep what nobody reads.
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            transport.abort()

    def cut_those_that_do_not_read(self) -> None:
        """End connections whose clients have not taken what was sent."""
        self.cut([one for one in self._all if one.transport.get_write_buffer_size()])

    def _close(self, connection: HttpConnection, why: str) -> None:
        self._cut[why] += 1
        self.cut([connection])

    def _sweep(self) -> None:
        now = time.monotonic()
        if 2 * len(self._all) >= self.limits.count:
            self._crowded_until = now + CROWDED_SECONDS
        limits = self.limits if now >= self._crowded_until else self._crowded_limits
        for connection in list(self._all):
            if (why := connection.overdue(now, limits)) is not None:
                self._close(connection, why)
        if self._cut and now >= self._log_after:
            self._log_after = now + LOG_SECONDS
            told = ", ".join(f"{count} because {why}" for why, count in sorted(self._cut.items()))
            log.warning("closed: %s; %d are open, from %d places", told, len(self._all), len(self.places))
            self._cut.clear()
        active = self._all or self._cut
        self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep) if active else None


def _may_go(connection: HttpConnection, now: float) -> bool:
    """True if a connection may be closed for others."""
    if connection.look(now) is Phase.ANSWER:
        return connection.unread_seconds(now) > UNREAD_SECONDS
    return now - connection.since > RESPITE_SECONDS


class CountingTransport:
    """A transport that knows how many bytes its client's machine has taken."""

    __slots__ = ("_descriptor", "_transport", "_written")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._descriptor: int = transport.get_extra_info("socket").fileno()
        self._written = 0

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)

    @property
    def unread(self) -> int:
        """Bytes that wait here, or in the system, until the client's machine takes them."""
        if self._transport.is_closing():
            return self._transport.get_write_buffer_size()
        in_system = struct.unpack("i", fcntl.ioctl(self._descriptor, termios.TIOCOUTQ, bytes(4)))[0]
        return self._transport.get_write_buffer_size() + in_system

    @property
    def unheard(self) -> bool:
        """True if its client has sent what has not been read yet, but will be by the next turn of the event loop."""
        if self._transport.is_closing() or not self._transport.is_reading():
            return False
        return fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4)) != bytes(4)

    @property
    def taken(self) -> int:
        """Bytes that reached the client's machine."""
        return self._written - self.unread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
