"""Connections: never more than there are descriptors for, and none that keeps the server waiting for long."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from .addresses import Networks, Places

if TYPE_CHECKING:
    from .http_protocol import HttpConnection
    from .settings import Settings

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
LOG_SECONDS = 10.0


class Connections:
    """All connections of a server. Used on its event loop only.

    Twice a second those are looked at that the server waits for. A new connection beyond a limit takes the place of the
    one that it has waited for longest, of those from the same address if these are too many; without any it is closed.
    """

    def __init__(self, count: int, settings: Settings) -> None:
        """count: most connections."""
        self.count = count
        self.places = Places(
            settings.max_connections_per_address or count // 2, Networks(settings.trusted_proxies or ())
        )
        self.num_made = 0
        """Connections so far."""
        self._seconds = settings.head_seconds, settings.body_seconds, settings.whole_body_seconds
        self._all: set[HttpConnection] = set()
        self._waiting: dict[HttpConnection, None] = {}  # the server waits for their clients, the longest first
        self._timer: asyncio.TimerHandle | None = None
        self._num_closed = 0  # since the log told of it
        self._log_after = 0.0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_answering(self) -> int:
        """Connections with a request that has no complete answer."""
        return sum(connection.answers for connection in self._all)

    def add(self, connection: HttpConnection) -> None:
        """A connection was made: close it, or another one, when there are too many."""
        self.num_made += 1
        place = connection.place = self.places.enter((connection.client or ("",))[0])
        self._all.add(connection)
        if self.places.is_over(place):
            self._close(next((one for one in self._waiting if one.place == place), connection))
        elif len(self._all) > self.count:
            self._close(next(iter(self._waiting), connection))
        self.note(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def note(self, connection: HttpConnection) -> None:
        """The server may have begun to wait for this connection's client, or may wait no more."""
        if not connection.waits:
            self._waiting.pop(connection, None)
        elif connection in self._all:
            self._waiting.setdefault(connection)

    def remove(self, connection: HttpConnection) -> None:
        """A connection is gone, or about to go."""
        if connection in self._all:
            self._all.discard(connection)
            self._waiting.pop(connection, None)
            self.places.leave(connection.place)

    def make_room(self) -> None:
        """Close the one that was waited for longest: there are no more descriptors."""
        for connection in [*self._waiting][:1]:
            self._close(connection)

    def _close(self, connection: HttpConnection) -> None:
        self._num_closed += 1
        self.remove(connection)
        connection.transport.abort()

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in [one for one in self._waiting if one.is_overdue(now, *self._seconds)]:
            self._close(connection)
        if self._num_closed and now >= self._log_after:
            self._log_after = now + LOG_SECONDS
            log.warning("closed %d connections that were too many or kept it waiting; %d are open, from %d places",
                        self._num_closed, len(self._all), len(self.places))  # fmt: skip
            self._num_closed = 0
        active = self._all or self._num_closed
        self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep) if active else None
