"""The bounds of the queue, and the refusal of work that can't be queued now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .queues import WaitingQueue


class Overloaded(Exception):
    """More requests wait than the engine queues; the same request may be accepted later.

    retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueRoom:
    """Limit of the waiting queue, shared by tenants."""

    def __init__(self, most: int | None, clock: Callable[[], float]) -> None:
        """most: requests that may wait; None: no limit."""
        self._most = most
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=64)  # when the latest requests ended

    def note_end(self) -> None:
        """Record that a running request has ended."""
        self._ends.append(self._clock())

    def check(self, queue: WaitingQueue, tenant: str, count: int = 1) -> None:
        """Raise Overloaded when there is no room for `count` more requests of `tenant`.

        A tenant's waiting requests must not outnumber the free places, so that new tenants find room. Changes
        nothing, so that any thread may look before it makes requests.
        """
        waiting = len(queue) + count - 1  # when the last of them is queued
        if self._most is None or waiting < self._most // 2:
            return
        own = queue.count(tenant) + count - 1 if tenant else 0
        check_bounds(waiting, own, self._most, lambda: self._seconds_to_drain(waiting / 4))

    def _seconds_to_drain(self, count: float) -> float:
        """Return how long `count` waiting requests take to start, by the recent rate; from 1 to 60 seconds."""
        ends = self._ends
        if len(ends) < 2:
            return 1.0
        rate = (len(ends) - 1) / max(1e-9, self._clock() - ends[0])
        return min(60.0, max(1.0, count / rate))


def check_bounds(waiting: int, own: int, most: int, retry_after: Callable[[], float]) -> None:
    """Raise Overloaded unless one more request may wait. own: the tenant's waiting requests; 0 for no tenant.

    retry_after: seconds to say, asked for if it is refused.
    """
    if waiting >= most:
        text = f"{waiting} generations wait, the queue holds {most}"
    elif waiting >= most // 2 and own >= most - waiting:
        text = f"{own} of your generations wait, and the queue has room for {most - waiting} of all clients"
    else:
        return
    raise Overloaded(f"{text}; try again later", retry_after())
