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
    """Copies a file that nobody changes any more to a path, on a thread. Until `finish`, the path is a link to what is
    copied, by a descriptor of this process.
    """

    def __init__(self, path: Path, source: FileIO) -> None:
        self._path, self._written = path, path.with_name(f".copy-{path.name}")
        self._source = os.dup(source.fileno())  # whoever gave it may close it meanwhile
        self._error: OSError | None = None
        self._stopped = False
        self.is_finished = False
        """True once the path is the copy."""
        self._thread = threading.Thread(target=self._run, name="chorus-file-copy", daemon=True)
        try:
            status = os.fstat(self._source)
            self.num_bytes = status.st_size
            self.identity = FileIdentity(status.st_dev, status.st_ino, status.st_ctime_ns)
            """Of the file that is copied."""
            path.symlink_to(f"/proc/{os.getpid()}/fd/{self._source}")
            self._thread.start()
        except BaseException:
            os.close(self._source)
            raise

    def finish(self) -> None:
        """Wait for the copy, and put it in the place of the link. Raises OSError."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._written.replace(self._path)
        self.is_finished = True

    def close(self) -> None:
        """Stop copying, unless it is done; the link is of no use any more."""
        self._stopped = True
        self._thread.join()
        if self._source >= 0:
            os.close(self._source)
            self._source = -1

    def _run(self) -> None:
        try:
            with self._written.open("xb", buffering=0) as file:
                self._copy(file.fileno())
                os.fsync(file.fileno())
        except OSError as error:
            self._error = error
            with suppress(OSError):
                self._written.unlink()

    def _copy(self, target: int) -> None:
        done = 0
        while done < self.num_bytes and not self._stopped:
            sent = os.sendfile(target, self._source, done, min(_PIECE, self.num_bytes - done))
            if not sent:
                raise OSError(f"the file given ends after {done} bytes")
            done += sent
