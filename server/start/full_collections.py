"""Full garbage collections, which hold all threads: seldom, and not because thousands of requests wait.

Python begins one whenever a quarter more objects have survived, as they do while a request of 2,048 texts is taken in:
the objects of 8,000 waiting texts take 0.3 s to visit, and that was repeated with each further request.

Tests: tests/server/test_turns.py
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

LEAST_SECONDS = 5.0
"""Between two full collections. Chosen."""

SHARE = 100
"""They take at most one part of so many of the time."""

_NEVER = 1 << 30


def collect_seldom(sleep: Callable[[float], object] = time.sleep) -> None:
    """Leave full collections to a thread of their own from now on; younger objects are collected as before."""
    first, second, _ = gc.get_threshold()
    gc.set_threshold(first, second, _NEVER)
    threading.Thread(target=_collect, args=(sleep,), name="chorus-garbage", daemon=True).start()


def _collect(sleep: Callable[[float], object]) -> None:
    pause: float = LEAST_SECONDS
    while True:
        sleep(pause)
        began = time.perf_counter()
        if gc.get_count()[2]:  # else nothing has survived a younger collection since
            gc.collect()
        pause = max(LEAST_SECONDS, SHARE * (time.perf_counter() - began))
