"""Requests in progress: how many there may be, and how they end when the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ApiError

ALWAYS_OPEN = ("/health", "/ping")
"""Routes that tell whether the server is well: nothing closes them, no key is needed, and they don't count."""

GENERATING = ("/v1/completions", "/v1/chat/completions")

CLOSE = {"connection": "close"}


class Gate:
    """Lets requests in and counts them; once it drains, none that asks for work."""

    def __init__(self) -> None:
        self.limit: int | None = None
        """Most requests at once that ask for work; None: any number. Looking is not counted."""
        self.draining = False
        self.cutting = False
        self._tasks: set[asyncio.Task] = set()
        self.num_generating = 0
        """Requests in progress that ask for answers of the model."""
        self._num_working = 0

    @property
    def active(self) -> int:
        """Requests in progress."""
        return len(self._tasks)

    @contextmanager
    def passing(self, method: str, path: str) -> Iterator[None]:
        """Count the running task as a request in progress. Raises an ApiError when it can't be taken."""
        if path in ALWAYS_OPEN:
            yield
            return
        works = method not in ("GET", "HEAD")
        if self.draining and works:
            message = "the server is shutting down and takes no new work; ask another one, or again when it is back"
            raise ApiError(503, message, code="draining", retry_after=5, headers=CLOSE)
        if works and self.limit is not None and self._num_working >= self.limit:
            message = f"{self._num_working} requests are in progress, which is all this server takes; try again later"
            raise ApiError(503, message, code="overloaded", retry_after=1, headers=CLOSE)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._num_working += works
        self.num_generating += path in GENERATING
        try:
            yield
        finally:
            self._tasks.discard(task)
            self._num_working -= works
            self.num_generating -= path in GENERATING

    def cut(self) -> None:
        """Cancel what is still in progress; whoever let it pass tells its client."""
        self.cutting = True
        for task in list(self._tasks):
            task.cancel()
