"""What other threads ask of the engine's thread, until that takes it between two steps.

Tests: tests/server/engine/test_inbox.py
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from operator import itemgetter

Call = Callable[..., None]
"""Runs an action; with a text, refuses it for that reason."""

SUBMITTED_AT_ONCE = 32
"""Requests that are submitted between two steps. A step computes few prompts of a flood, and others wait for it."""


class Inbox:
    """Calls in the order of their arrival, but for requests: tenants take turns, and a few are taken at a time.

    Thousands of requests of one tenant delay neither the next step nor another tenant's request. No lock: the caller
    has one.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._calls: list[tuple[int, Call]] = []
        self._requests: dict[str, deque[tuple[int, str, Call]]] = {}  # by tenant; the first one is next
        self._tenants: dict[str, str] = {}  # by request

    def __bool__(self) -> bool:
        return bool(self._calls or self._requests)

    def put(self, call: Call) -> None:
        self._calls.append((next(self._numbers), call))

    def put_request(self, request_id: str, tenant: str, call: Call) -> None:
        """Add a call that submits a request."""
        self._requests.setdefault(tenant, deque()).append((next(self._numbers), request_id, call))
        self._tenants[request_id] = tenant

    def take(self, most: int = SUBMITTED_AT_ONCE) -> list[Call]:
        """Take all calls but those that submit requests, and at most so many of these."""
        taken, self._calls = self._calls, []
        while self._requests and most > 0:
            most -= 1
            tenant = next(iter(self._requests))
            queue = self._requests.pop(tenant)
            number, request_id, call = queue.popleft()
            self._tenants.pop(request_id, None)
            taken.append((number, call))
            if queue:
                self._requests[tenant] = queue
        taken.sort(key=itemgetter(0))
        return [call for _, call in taken]

    def take_all(self) -> list[Call]:
        return self.take(len(self._tenants) + sum(map(len, self._requests.values())))

    def take_request(self, request_id: str) -> Call | None:
        """Take the call that submits a request; None if it was taken already, or never came."""
        tenant = self._tenants.pop(request_id, None)
        if tenant is None:
            return None
        queue = self._requests[tenant]
        found = next(each for each in queue if each[1] == request_id)
        queue.remove(found)
        if not queue:
            del self._requests[tenant]
        return found[2]
