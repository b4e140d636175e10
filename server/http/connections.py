"""Connections: never more than there are descriptors for, and none that keeps the server waiting for long."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Protocol

from ..access.addresses import ConnectionLimiter, Networks
from .accepted import Accepted, Limits

if TYPE_CHECKING:
    from ..settings import Settings

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
LOG_SECONDS = 10.0


class Connection(Protocol):
    """An accepted or started connection."""

    network: str | None
    """See `ConnectionLimiter`."""

    @property
    def answers(self) -> bool:
        """True if a request has no complete response yet."""
        ...

    @property
    def waits(self) -> bool:
        """True if the server waits for the client."""
        ...

    def is_overdue(self, now: float, limits: Limits) -> bool: ...
    def expire(self) -> bool:
        """Handle an overdue client: True if the connection is to be closed, False if its response gives the reason."""
        ...

    def close(self) -> None: ...


class Connections:
    """All connections of a server. Used only on its event loop.

    Every `SWEEP_SECONDS`, connections with an overdue client are closed. A new connection beyond a limit replaces the
    one that the server has waited for longest: over an address's limit, one from that address. If the server waits for
    none, the new connection is closed.
    """

    def __init__(self, count: int, settings: Settings) -> None:
        """count: maximum number of connections."""
        self.count = count
        self.limiter = ConnectionLimiter(
            settings.max_connections_per_address or count // 2, Networks(settings.trusted_proxies or ())
        )
        self.num_made = 0
        """Connections so far."""
        self._limits: Limits = settings
        self._all: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # connections that the server waits for, longest first
        self._timer: asyncio.TimerHandle | None = None
        self._num_closed = 0  # since the last log line
        self._log_after = 0.0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_answering(self) -> int:
        """Connections with a request that has no complete response."""
        return sum(connection.answers for connection in self._all)

    @property
    def is_full(self) -> bool:
        """True if the maximum is reached and each connection has a request in progress."""
        return len(self._all) >= self.count and not self._waiting

    def add(self, one: Accepted) -> bool:
        """A connection was accepted: close it, or another one, if there are too many. False if it was closed."""
        self.num_made += 1
        network = one.network = self.limiter.enter(one.address)
        self._all.add(one)
        if self.limiter.is_over(network):
            self.close(next((other for other in self._waiting if other.network == network), one))
        elif len(self._all) > self.count:
            self.close(next(iter(self._waiting), one))
        self.note(one)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        return one in self._all

    def begin(self, accepted: Connection, connection: Connection) -> None:
        """An accepted connection was started."""
        connection.network = accepted.network
        self._all.discard(accepted)
        self._all.add(connection)
        self.note(connection)

    def note(self, one: Connection) -> None:
        """The server may have begun, or ceased, to wait for this connection's client."""
        if not one.waits:
            self._waiting.pop(one, None)
        elif one in self._all:
            self._waiting.setdefault(one)

    def remove(self, one: Connection) -> None:
        """A connection has closed, or is about to."""
        if one in self._all:
            self._all.discard(one)
            self._waiting.pop(one, None)
            self.limiter.leave(one.network)

    def make_room(self) -> None:
        """Close the connection that waits longest, because no descriptor is left."""
        for one in [*self._waiting][:1]:
            self.close(one)

    def close(self, one: Connection) -> None:
        """Close a connection at once."""
        self._num_closed += 1
        self.remove(one)
        one.close()

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in [one for one in self._waiting if one.is_overdue(now, self._limits)]:
            if connection.expire():
                self.close(connection)
            else:
                self._num_closed += 1
        if self._num_closed and now >= self._log_after:
            self._log_after = now + LOG_SECONDS
            log.warning(
                "closed %d connections that were too many or kept it waiting; %d are open, from %d networks",
                self._num_closed,
                len(self._all),
                len(self.limiter),
            )
            self._num_closed = 0
        active = self._all or self._num_closed
        self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep) if active else None
