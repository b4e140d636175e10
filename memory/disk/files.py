"""The calls to the operating system that cached KV in files needs, so that tests can let them fail or hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress


class Files:
    """Files of one user. Every method may raise OSError, or never return."""

    def create(self, path: str, num_bytes: int) -> int:
        """Create a file with room for `num_bytes`, and open it for writing."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                os.unlink(path)
            raise
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Write some of the data at the file's position; return how many bytes."""
        return os.write(fd, data)

    def open(self, path: str) -> int:
        """Open a file for reading; a link is refused."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)

    def read(self, fd: int, data: memoryview) -> int:
        """Read into `data`; return how many bytes, 0 at the end."""
        return os.readv(fd, (data,))

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, path: str, other: str) -> None:
        os.rename(path, other)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def touch(self, path: str) -> None:
        """Note that a file was used just now."""
        os.utime(path)

    def make_folder(self, path: str) -> None:
        """Make a folder, with those that it lies in, for its user alone."""
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return
        except FileNotFoundError:
            self.make_folder(os.path.dirname(path))
            self.make_folder(path)

    def remove_folder(self, path: str) -> None:
        """Remove a folder; an error if it has entries."""
        os.rmdir(path)

    def entries(self, path: str) -> Iterator[os.DirEntry[str]]:
        """Entries of a folder; none if it is gone."""
        try:
            with os.scandir(path) as entries:
                yield from entries
        except FileNotFoundError:
            return
