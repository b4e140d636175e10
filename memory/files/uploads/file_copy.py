"""A copy of a file that is made while the file is read.

Tests: tests/memory/files/uploads/test_file_copy.py
"""

from __future__ import annotations

import os
import threading
from io import FileIO
from pathlib import Path

from ..given_up import check_wanted
from ..tensor_file import FileIdentity
from .lent_files import lend

_PIECE = 16 << 20
_LOOK_SECONDS = 0.1


class FileCopy:
    """Copies a file that nobody changes any more to a path. Until `finish` or `close`, who opens the path as a file of
    an adapter's directory gets what is copied.
    """

    def __init__(self, path: Path, source: FileIO) -> None:
        """path: of a new file, or of one whose content counts no more. Raises OSError."""
        self._copying = threading.Lock()
        self._is_whole, self._ended = False, threading.Event()
        self._error: BaseException | None = None
        self._stopped = False
        self._source = os.dup(source.fileno())  # whoever gave it may close it meanwhile
        try:
            status = os.fstat(self._source)
            self._file = _opened(path)
            try:
                present = os.fstat(self._file).st_size  # which counts as the upload's
                os.ftruncate(self._file, min(status.st_size, present))
                self._end_loan = lend(path, self._source)
            except BaseException:
                os.close(self._file)
                raise
        except BaseException:
            os.close(self._source)
            raise
        self.num_bytes = status.st_size
        self.identity = FileIdentity(status.st_dev, status.st_ino, status.st_ctime_ns)
        """Of the file that is copied."""

    def run(self) -> None:
        """Copy, on any thread, once."""
        with self._copying:
            try:
                if not self._stopped:
                    self._copy()
            except BaseException as error:
                self._error = error
            finally:
                self._ended.set()

    def finish(self) -> None:
        """Wait for the copy; from now on the path is it. Raises OSError, GivenUp, and what `run` met."""
        while not self._ended.wait(_LOOK_SECONDS):
            check_wanted()
            if self._stopped:
                break
        if self._error is not None:
            raise self._error
        if not self._is_whole:
            raise OSError("the copy was given up")
        self._end_loan()

    def stop(self) -> None:
        """Copy no more, unless it is done: `finish` need not wait."""
        self._stopped = True

    def close(self) -> None:
        """The same, and end the loan."""
        self.stop()
        with self._copying:
            self._ended.set()
            if self._source >= 0:
                self._end_loan()
                os.close(self._source)
                os.close(self._file)
                self._source = self._file = -1

    def _copy(self) -> None:
        done = 0
        while done < self.num_bytes and not self._stopped:
            sent = os.sendfile(self._file, self._source, done, min(_PIECE, self.num_bytes - done))
            if not sent:
                raise OSError(f"the file given ends after {done} bytes")
            done += sent
        if done == self.num_bytes:
            os.fsync(self._file)
            self._is_whole = True


def _opened(path: Path) -> int:
    """A descriptor of a file to write, which may be there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except PermissionError:  # a backup may have come back read-only
        path.unlink()
        return os.open(path, flags | os.O_EXCL, 0o666)
