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
    """The open file; only one thread of a process may append at a time."""

    def __init__(self, path: Path, header: str, flag: str, noun: str) -> None:
        """Creates the file if it is missing. Raises NotAppendable if it holds something else, or can't be opened.

        flag: names the file on the command line. noun: what the file is.
        """
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NotAppendable(f"{flag} {path}: {error.strerror}; name a file in an existing directory") from None
        try:
            self._begin(header, f"{flag} {path}: it exists and is not such a {noun}; name another file")
        except OSError as error:
            os.close(self._file)
            raise NotAppendable(f"{flag} {path}: {error.strerror}; name another file") from None
        except NotAppendable:
            os.close(self._file)
            raise

    def append(self, rows: Iterable[Sequence[object]]) -> None:
        """Append all rows, or none: an incomplete row would spoil the next one of another process. Raises OSError."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        data = text.getvalue().encode("utf-8", "backslashreplace")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            size = os.fstat(self._file).st_size
            if os.write(self._file, data) < len(data):
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self, header: str, refusal: str) -> None:
        line = f"{header}\n".encode()
        fcntl.flock(self._file, fcntl.LOCK_EX)  # API servers of one cluster open it at the same time
        begin = os.pread(self._file, len(line), 0)
        if not begin:
            os.write(self._file, line)
        elif begin != line:
            raise NotAppendable(refusal)
        fcntl.flock(self._file, fcntl.LOCK_UN)
