"""The largest file of a removed directory, kept for a while: the next version of an adapter is written over it.

The system clears fresh memory at some cost, and a virtual machine may have to get it from its host, which takes longer
than the copy.

Tests: tests/memory/files/uploads/test_spare_file.py
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LEAST_BYTES = 16 << 20
"""Of a file that is worth keeping."""

SPARE_SECONDS = 600.0
"""Seconds for which a file is kept."""


class SpareFile:
    """At most one file, in a folder of its own below `root`, which is locked while it exists. Thread-safe.

    prefix: of the folder's name. Who finds the folder unlocked may remove it.
    """

    def __init__(self, root: Path, prefix: str, clock: Callable[[], float]) -> None:
        self._root, self._prefix, self._clock = root, prefix, clock
        self._lock = threading.Lock()
        self._folder: tuple[Path, int] | None = None
        self._since = 0.0
        self._is_closed = False
        self.num_bytes = 0
        """Of the file; 0 without one."""

    def keep(self, directory: Path) -> None:
        """Take the largest file of a directory that nobody uses, unless the present one is larger."""
        with self._lock, suppress(OSError):
            found = [(entry.stat(follow_symlinks=False), entry.path) for entry in os.scandir(directory)]
            # another name of a file must not lose its content
            alone = [(status.st_size, path) for status, path in found if status.st_nlink == 1]
            size, path = max(alone, default=(0, ""))
            if size >= max(LEAST_BYTES, self.num_bytes) and not self._is_closed:
                os.replace(path, self._file())
                self.num_bytes, self._since = size, self._clock()

    def take(self, path: Path) -> None:
        """Move the file, if there is one, to a path where none is; what it holds counts no more."""
        with self._lock, suppress(OSError):
            if self.num_bytes:
                self._file().rename(path)
                self.num_bytes = 0

    def drop(self, older_than: float | None = None) -> None:
        """Remove the file. older_than: only if it was kept longer ago than so many seconds."""
        with self._lock:
            is_due = older_than is None or not 0 <= self._clock() - self._since <= older_than
            if self.num_bytes and is_due:
                self._file().unlink(missing_ok=True)
                self.num_bytes = 0

    def close(self) -> None:
        """Remove the file and its folder."""
        with self._lock:
            self.num_bytes, self._is_closed = 0, True
            if self._folder is not None:
                folder, fd = self._folder
                self._folder = None
                shutil.rmtree(folder, ignore_errors=True)
                os.close(fd)

    def _file(self) -> Path:
        """Where the file is. Raises OSError."""
        if self._folder is None:
            folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._root))
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH)
            self._folder = folder, fd
        return self._folder[0] / "spare"
