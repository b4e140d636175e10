"""The lock of a registry's file: one process changes the file, while others may read it, such as for a backup.

SQLite's own exclusive lock would keep readers out, too. Therefore the lock is another file, next to it.

Tests: tests/memory/adapters/test_registry_store.py
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

WAIT_SECONDS = 1.0
"""Seconds for which a lock is awaited: the process that has it may be about to end."""

POLL_SECONDS = 0.05


class RegistryLock:
    """The lock, held from the start until `release`, or until the process ends."""

    def __init__(self, file: Path) -> None:
        """file: the registry's. Raises BlockingIOError if another has the lock, and OSError."""
        file = file.resolve()  # a link to the file must lead to the same lock
        self._fd = os.open(file.with_name(f"{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + WAIT_SECONDS
        try:
            while not self._try():
                if time.monotonic() >= deadline:
                    raise BlockingIOError
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.release()
            raise

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
