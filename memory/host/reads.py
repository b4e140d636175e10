"""Runners of adapters' reads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol


class Reads(Protocol):
    """Runs reads; the simulator injects one that takes virtual time."""

    def submit(self, read: Callable[[], Any]) -> Future:
        """Run `read` soon. Its future is `running()` from when it begins until it ends."""
        ...

    def wait(self, pending: list[Future], timeout: float) -> None:
        """Let time go by until one of `pending` has ended, at most `timeout` seconds."""
        wait(pending, timeout, FIRST_COMPLETED)

    def wake(self) -> None:
        """End the `wait` under way, or else the next one at once; from any thread."""

    def set_aside(self, future: Future) -> bool:
        """Let others be read beside a read that takes long, as if it were not there. Whether that could be done."""
        return False

    def shutdown(self) -> None: ...


class InlineReads(Reads):
    """Reads at once, on the caller's thread: what is asked for is ready when the call returns."""

    def submit(self, read: Callable[[], Any]) -> Future:
        future: Future = Future()
        try:
            future.set_result(read())
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Nothing is under way."""
