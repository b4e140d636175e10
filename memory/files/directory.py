"""An adapter's directory, held open: its files are looked up only in it, and read as they were found.

Tests: tests/memory/files/test_adapter_directory.py.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Generator, Sequence
from itertools import islice
from pathlib import Path

from .error import AdapterFormatError, shown, unreadable
from .uploads.lent_files import lent

MAX_PATH_BYTES = 4096
MAX_NAMES = 4096
_PIECE = 64 << 10

_CLOSED = os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOCTTY", 0)
SHARED_MEMORY = "/dev/shm"
"""Everybody may write there, so only the server's own files count, and no links."""

_LOOK_ONLY = getattr(os, "O_PATH", 0)  # opening a device for reading may already have effects


class AdapterDirectory:
    """An opened directory. Its files may be links, as in Hugging Face's caches, except in shared memory.

    roots: resolved directories; the directory and every file must really be below one of them. None given: anywhere.
    Raises AdapterFormatError for a file that can't be opened, has the wrong kind, or is elsewhere.
    """

    def __init__(self, path: Path, roots: Sequence[Path] = ()) -> None:
        self.path = path
        self._roots = [os.fspath(root) for root in roots]
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise AdapterFormatError(f"{shown(str(path))}: too long; a path has at most {MAX_PATH_BYTES} bytes")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _CLOSED)
        except FileNotFoundError:
            raise AdapterFormatError(f"{path}: no such directory") from None
        except NotADirectoryError as error:
            raise AdapterFormatError(f"{path}: {self._why_no_directory(error)}") from None
        except (OSError, ValueError) as error:
            raise unreadable(shown(str(path)), error) from error
        try:
            self._check_place(self._fd, path)
            self._no_links = os.O_NOFOLLOW if _is_below(_real_path(self._fd, path), SHARED_MEMORY) else 0
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> AdapterDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def has(self, name: str) -> bool:
        """True if the name exists, even as a dangling link."""
        try:
            os.lstat(name, dir_fd=self._fd)
        except OSError:
            return False
        return True

    def names(self) -> list[str]:
        """Return the sorted names in the directory, at most `MAX_NAMES`; empty if it can't be listed."""
        try:
            with os.scandir(self._fd) as entries:
                return sorted(entry.name for entry in islice(entries, MAX_NAMES))
        except (OSError, TypeError):  # on systems where a descriptor can't be listed
            return []

    def open(self, name: str, kind: str) -> int:
        """Open the regular file `name`; the caller closes the descriptor. kind: the needed file, for messages."""
        file = self.path / name
        if (fd := self._lent(name)) is not None:
            return fd
        try:
            fd = os.open(name, (_LOOK_ONLY or os.O_RDONLY) | _CLOSED | self._no_links, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ENOENT and not self.has(name):
                raise AdapterFormatError(f"{file}: not found; {kind} is needed") from None
            if error.errno == errno.ELOOP and self._no_links:
                raise _linked(file) from None
            raise unreadable(file, error) from error
        try:
            if stat.S_ISLNK(os.fstat(fd).st_mode):  # only O_PATH opens one, with O_NOFOLLOW
                raise _linked(file)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise AdapterFormatError(f"{file}: not a regular file; {kind} is needed")
            self._check_place(fd, file)
            if _LOOK_ONLY:
                looked_at, fd = fd, -1
                try:
                    fd = os.open(f"/proc/self/fd/{looked_at}", os.O_RDONLY | _CLOSED)
                finally:
                    os.close(looked_at)
        except OSError as error:
            _close(fd)
            raise unreadable(file, error) from error
        except BaseException:
            _close(fd)
            raise
        return fd

    def _lent(self, name: str) -> int | None:
        """What this process lends for a file that it is writing."""
        try:
            return lent(self._fd, name)
        except OSError as error:
            raise unreadable(self.path / name, error) from error

    def read(self, name: str, limit: int, kind: str) -> bytes:
        """Read a whole file of at most `limit` bytes."""
        file = self.path / name
        fd = self.open(name, kind)
        try:
            data = bytearray()
            while len(data) <= limit and (part := os.read(fd, limit + 1 - len(data))):
                data += part
        except OSError as error:
            raise unreadable(file, error) from error
        finally:
            os.close(fd)
        if len(data) > limit:
            raise self._too_long(name, limit, kind)
        return bytes(data)

    def size(self, name: str, kind: str) -> int:
        """The number of bytes of a file."""
        fd = self.open(name, kind)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def pieces(self, name: str, start: int, limit: int, kind: str) -> Generator[bytes, None, None]:
        """A file's bytes from `start` on, piece by piece. Raises AdapterFormatError if it is longer than `limit`."""
        fd = self.open(name, kind)
        try:
            os.lseek(fd, start, os.SEEK_SET)
            while part := os.read(fd, _PIECE):
                start += len(part)
                if start > limit:
                    raise self._too_long(name, limit, kind)
                yield part
        except OSError as error:
            raise unreadable(self.path / name, error) from error
        finally:
            os.close(fd)

    def _too_long(self, name: str, limit: int, kind: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self.path / name}: is longer than {limit} bytes; {kind} is needed")

    def read_beginning(self, name: str, size: int, kind: str) -> bytes:
        """Read a file's first bytes, at most `size`."""
        fd = self.open(name, kind)
        try:
            data = bytearray()
            while len(data) < size and (part := os.read(fd, size - len(data))):
                data += part
        except OSError as error:
            raise unreadable(self.path / name, error) from error
        finally:
            os.close(fd)
        return bytes(data)

    def _check_place(self, fd: int, path: Path) -> None:
        """Refuse a file that really is outside of the roots, or another user's in shared memory."""
        real = _real_path(fd, path)
        if _is_below(real, SHARED_MEMORY) and os.fstat(fd).st_uid != os.geteuid():
            raise AdapterFormatError(
                f"{path}: belongs to another user; in {SHARED_MEMORY} only the server's own files count"
            )
        if self._roots and not any(_is_below(real, root) for root in self._roots):
            raise AdapterFormatError(
                f"{path}: lies outside the directories that adapters may be loaded from; copy the file there"
            )

    @staticmethod
    def _why_no_directory(error: OSError) -> str:
        try:
            os.stat(error.filename)
        except OSError as stat_error:
            return f"cannot be read: {stat_error.strerror}"
        return "not a directory; a PEFT adapter directory is needed"


def _real_path(fd: int, path: Path) -> str:
    """Path of an open file. On Linux the kernel reports it, so nothing can be swapped in between."""
    if sys.platform == "linux":
        return os.readlink(f"/proc/self/fd/{fd}")
    return os.path.realpath(path)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _linked(file: Path) -> AdapterFormatError:
    return AdapterFormatError(f"{file}: is a link, and in {SHARED_MEMORY} files must not be links; copy it there")


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
