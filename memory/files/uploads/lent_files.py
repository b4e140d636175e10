"""Open files that stand for the files of a directory while those are written.

Tests: tests/memory/files/uploads/test_file_copy.py
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

_lent: dict[tuple[int, int, str], int] = {}
_lock = threading.Lock()


def lend(path: Path, fd: int) -> Callable[[], None]:
    """Have this process find an open file wherever it opens `path` in its directory, until the function that is
    returned is called. fd: stays open until then. Raises OSError.
    """
    key = (*_of(os.stat(path.parent)), path.name)
    with _lock:
        _lent[key] = fd

    def end() -> None:
        with _lock:
            _lent.pop(key, None)

    return end


def lent(directory: int, name: str) -> int | None:
    """A new descriptor, for reading, of what stands for a file of an open directory. Raises OSError."""
    if not _lent:
        return None
    key = (*_of(os.fstat(directory)), name)
    with _lock:  # so that the descriptor is not closed, and its number another file's, meanwhile
        fd = _lent.get(key)
        return None if fd is None else os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def _of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
