"""Requests in progress and the bytes of their bodies: limits per tenant and in total, and cancelling at the end.

Tests: tests/server/access/test_shared_bounds.py
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..access.grants import ALL, Grant
from ..access.shared_bounds import RequestSlots, TokenBudgets
from ..errors import GENERATES, ApiError

ALWAYS_OPEN = ("/health", "/ping")
"""Routes that report the server's health: always open, without a key, and not counted."""

GENERATING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/invocations",
    "/inference/v1/generate",
    "/v1/embeddings",
    "/classify",
    "/v1/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    *GENERATES,
)


class SharedLimit:
    """A limit that tenants share: none may hold more than it leaves free, so other tenants always find some."""

    def __init__(self, what: str, most: int | None = None) -> None:
        """what: the things held, for messages. most: maximum for all tenants together; None: unlimited."""
        self.most = most
        self._what = what
        self._held: Counter[str] = Counter()
        self.total = 0
        self._changing = threading.RLock()  # what is held may be given back on any thread

    def take(self, tenant: str, count: int = 1) -> None:
        """Hold `count` more. Raises an ApiError: 503 if all tenants together have too many, 429 if this one has."""
        with self._changing:
            if self.most is not None and self._held[tenant] + count > (free := self.most - self.total):
                if full := count > free:
                    text = f"{self.total} {self._what} are in progress, which is all this server takes"
                else:
                    own = self._held[tenant]
                    text = f"{own} of your {self._what} are in progress, and there is room for {free} of all clients"
                raise ApiError(503 if full else 429, f"{text}; try again later", code="overloaded", retry_after=1)
            self._held[tenant] += count
            self.total += count

    def held(self, tenant: str) -> int:
        """Number that a tenant holds."""
        return self._held[tenant]

    def give_back(self, tenant: str, count: int = 1) -> None:
        """Hold `count` fewer."""
        with self._changing:
            self.total -= count
            self._held[tenant] -= count
            if not self._held[tenant]:
                del self._held[tenant]


class Held:
    """What a request holds of a limit until nothing refers to this."""

    def __init__(self, limit: SharedLimit, tenant: str) -> None:
        self._limit, self._tenant, self._counts = limit, tenant, list[int]()
        weakref.finalize(self, _give_back, limit, tenant, self._counts).atexit = False

    def take(self, count: int) -> None:
        """Hold `count` more. Raises an ApiError, as `SharedLimit.take` does."""
        self._limit.take(self._tenant, count)
        self._counts.append(count)

    def give_back(self) -> None:
        """Hold nothing more."""
        _give_back(self._limit, self._tenant, self._counts)


def _give_back(limit: SharedLimit, tenant: str, counts: list[int]) -> None:
    count = sum(counts)
    counts.clear()
    limit.give_back(tenant, count)


ASLEEP_SECONDS = 5.0
"""Seconds after which a client of a sleeping server should ask again."""


class Gate:
    """Admits and counts requests; while draining, it admits none that asks for work."""

    def __init__(
        self,
        most_body_bytes: int | None = None,
        shared: Path | None = None,
        most_image_bytes: int | None = None,
    ) -> None:
        """most_body_bytes: maximum for all bodies being read. shared: directory in which the processes that serve the
        same clients count the keys' limits together; None: there is one process. most_image_bytes: maximum for images'
        files of requests in progress.
        """
        self.requests = SharedLimit("requests")
        """Requests in progress that ask for work; read-only requests are not counted."""
        self.request_slots = RequestSlots(shared and shared / "seats")
        """The same for keys with a limit, by the key's tenant rather than one that a gateway names within it."""
        self.tokens = TokenBudgets(file=shared and shared / "tokens")
        self.bodies = SharedLimit("bytes of bodies", most_body_bytes)
        self.images = SharedLimit("bytes of images", most_image_bytes)
        self.draining = False
        self.cutting = False
        self.asleep = False
        """The engine sleeps: requests that generate are refused."""
        self._tasks: set[asyncio.Task] = set()
        self.num_generating = 0
        """Requests in progress that generate tokens."""

    @property
    def active(self) -> int:
        """Requests in progress."""
        return len(self._tasks)

    @contextmanager
    def passing(self, method: str, path: str, tenant: str = "", caller: str = "", grant: Grant = ALL) -> Iterator[None]:
        """Count the running task as a request in progress. Raises an ApiError if the request is refused.

        caller: the owner of the key, which has the grant.
        """
        if path in ALWAYS_OPEN:
            yield
            return
        works, generates = method not in ("GET", "HEAD"), path in GENERATING
        if self.draining and works:
            message = "the server is shutting down and takes no new work; ask another one, or again when it is back"
            raise ApiError(503, message, code="draining", retry_after=5, headers={"connection": "close"})
        if self.asleep and generates:
            message = "the server is asleep; ask another one, or again after POST /wake_up"
            raise ApiError(503, message, code="asleep", retry_after=ASLEEP_SECONDS)
        task = asyncio.current_task()
        assert task is not None
        with ExitStack() as held:
            if works:
                self._take(held, tenant, caller, grant, generates=generates)
            self._tasks.add(task)
            self.num_generating += generates
            try:
                yield
            finally:
                self._tasks.discard(task)
                self.num_generating -= generates
                if works:
                    self.tokens.share()

    def _take(self, held: ExitStack, tenant: str, caller: str, grant: Grant, *, generates: bool) -> None:
        """Take a request slot of the key and a connection slot of the tenant; `held` returns them. Raises an ApiError
        if either has none.
        """
        if generates and grant.tokens_per_minute is not None:
            self.tokens.check(caller, grant.tokens_per_minute)
        if (most := grant.requests) is not None:
            if (slot := self.request_slots.take(caller, most)) is None:
                text = f"{most} of your requests are in progress, your key allows {most} at once; try again later"
                raise ApiError(429, text, code="rate_limit_exceeded", retry_after=1)
            held.callback(self.request_slots.give_back, caller, slot)
        self.requests.take(tenant)
        held.callback(self.requests.give_back, tenant)

    def cut(self) -> None:
        """Cancel the requests in progress; `Doors` sends the responses."""
        self.cutting = True
        for task in list(self._tasks):
            task.cancel()
