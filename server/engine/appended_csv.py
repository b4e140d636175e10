"""A CSV file to which several processes append whole rows.

Tests: tests/server/engine/test_recorder.py, tests/server/engine/test_usage_file.py
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path


class NotAppendable(ValueError):
    """The file can't be appended to; the text names it."""


class AppendedCsv:
    """The open file; only one thread of a process may append at a time.

    The file may be rotated: rows go to the file that has the path when they are appended, which begins with the header.
    """

    def __init__(self, path: Path, header: str, flag: str, noun: str) -> None:
        """Creates the file if it is missing. Raises NotAppendable if it holds something else, or can't be opened.

        flag: names the file on the command line. noun: what the file is.
        """
        self.path = path
        self._header = f"{header}\n".encode()
        self._refusal = f"it exists and is not such a {noun}"
        try:
            self._file = self._open()
        except OSError as error:
            raise NotAppendable(f"{flag} {path}: {error.strerror}; name a file in an existing directory") from None
        try:
            self.append(())
        except OSError as error:
            self.close()
            raise NotAppendable(f"{flag} {path}: {error.strerror}; name another file") from None

    def append(self, rows: Iterable[Sequence[object]]) -> None:
        """Append all rows, or none: an incomplete row would spoil the next one of another process. Raises OSError."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        data = text.getvalue().encode("utf-8", "backslashreplace")
        try:
            self._lock()
            size = os.fstat(self._file).st_size
            begin = os.pread(self._file, len(self._header), 0)
            if begin == self._header:
                data = self._end_of_cut_line(size) + data
            elif self._header.startswith(begin):  # empty, or cut off
                os.ftruncate(self._file, size := 0)
                data = self._header + data
            else:
                raise OSError(errno.EINVAL, self._refusal)
            if data and os.write(self._file, data) < len(data):
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _lock(self) -> None:
        """Lock the file that has the path now: API servers of one cluster open it, and append, at the same time."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        while not self._is_at_path():
            moved, self._file = self._file, self._open()
            os.close(moved)  # which unlocks it
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            return False

    def _end_of_cut_line(self, size: int) -> bytes:
        """The end that a last line lacks if its writer was killed, or its machine lost power."""
        return b"" if os.pread(self._file, 1, size - 1) == b"\n" else b"\n"
