"""A copy of a file that is made while the file is read.

Tests: tests/memory/files/uploads/test_file_copy.py
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path

from ..tensor_file import FileIdentity

_PIECE = 16 << 20


class FileCopy:
    """Copies a file that nobody changes any more to a path. Until `finish`, the path is a link to what is copied, by a
    descriptor of this process.
    """

    def __init__(self, path: Path, source: FileIO) -> None:
        """Raises OSError."""
        self._path, self._written = path, path.with_name(f".copy-{path.name}")
        self._copying = threading.Lock()
        self._is_whole, self._ended = False, threading.Event()
        self._error: BaseException | None = None
        self._stopped = False
        self.is_finished = False
        """True once the path is the copy."""
        self._source = os.dup(source.fileno())  # whoever gave it may close it meanwhile
        status = os.fstat(self._source)
        self.num_bytes = status.st_size
        self.identity = FileIdentity(status.st_dev, status.st_ino, status.st_ctime_ns)
        """Of the file that is copied."""

    def link(self) -> bool:
        """Have the path be the link; False where none can be made or followed."""
        try:
            self._path.symlink_to(f"/proc/{os.getpid()}/fd/{self._source}")
            self._path.stat()
        except OSError:
            self._path.unlink(missing_ok=True)
            return False
        return True

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
        """Wait for the copy, and put it in the place of the link. Raises OSError, and what `run` met."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if not self._is_whole:
            raise OSError("the copy was given up")
        self._written.replace(self._path)
        self.is_finished = True

    def close(self) -> None:
        """Stop copying, unless it is done; there is no link any more."""
        self._stopped = True
        with self._copying:
            self._ended.set()
            if not self.is_finished:
                with suppress(OSError):  # who follows it later must not find another file of that number
                    self._path.unlink(missing_ok=True)
            if self._source >= 0:
                os.close(self._source)
                self._source = -1

    def _copy(self) -> None:
        with self._written.open("xb", buffering=0) as file:
            done = 0
            while done < self.num_bytes and not self._stopped:
                sent = os.sendfile(file.fileno(), self._source, done, min(_PIECE, self.num_bytes - done))
                if not sent:
                    raise OSError(f"the file given ends after {done} bytes")
                done += sent
            if done == self.num_bytes:
                os.fsync(file.fileno())
                self._is_whole = True
