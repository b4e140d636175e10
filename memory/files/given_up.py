"""Ends long computations that nobody waits for any longer, such as reading a large file after its deadline.

Tests: tests/memory/host/test_daemon_pool.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GivenUp(Exception):
    """Nobody waits for this call any longer."""


_running = threading.local()


@contextmanager
def wanted_while(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Have `check_wanted` ask this function, on this thread, within the `with` block."""
    _running.is_wanted = is_wanted
    try:
        yield
    finally:
        del _running.is_wanted


def check_wanted() -> None:
    """Raise GivenUp if nobody waits for the running call any longer. Long computations ask now and then."""
    is_wanted = getattr(_running, "is_wanted", None)
    if is_wanted is not None and not is_wanted():
        raise GivenUp("nobody waits for it any longer")
