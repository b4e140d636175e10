"""Reads of adapters on the thread of the caller, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..memory.host.reads import Reads


class InlineReads(Reads):
    """Reads at once, on the caller's thread: the read has ended when `submit` returns."""

    def submit(self, read: Callable[[], Any], group: str = "") -> Future:
        future: Future = Future()
        try:
            future.set_result(read())
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Nothing is under way."""
