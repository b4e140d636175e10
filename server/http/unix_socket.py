"""A Unix socket for processes of the server's own user, and the file descriptors that come over it.

Tests: tests/server/http/test_unix_socket.py
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

ADDRESS = "unix"
"""Stands for the address of each client of a Unix socket."""

MODE = 0o600

MAX_DESCRIPTORS = 4
"""Descriptors that a connection may bring."""

SCOPE = "chorus.descriptors"
"""Where a request's scope has its connection's `Descriptors`."""

_SEALS = {"F_SEAL_SHRINK": 0x2, "F_SEAL_GROW": 0x4, "F_SEAL_WRITE": 0x8}
_F_GET_SEALS = 1034


class Unsealed(ValueError):
    """A descriptor whose content may still change, or that is no memory file."""


class Descriptors:
    """The descriptors that came with the first bytes of a connection. Those that nobody takes close with it."""

    def __init__(self) -> None:
        self._free: dict[int, int] = {}  # by number of arrival
        self._count = 0

    def receive(self, client: socket.socket, size: int) -> bytes:
        """Read from a Unix socket. Descriptors beyond `MAX_DESCRIPTORS` are closed."""
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, _, _ = client.recvmsg(size, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        for level, kind, numbers in ancillary:
            if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                continue
            fds = array.array("i")
            fds.frombytes(numbers[: len(numbers) - len(numbers) % fds.itemsize])
            for fd in fds:
                self._add(fd)
        return data

    def _add(self, fd: int) -> None:
        if self._count >= MAX_DESCRIPTORS:
            os.close(fd)
            return
        self._free[self._count] = fd
        self._count += 1

    def take(self, number: int) -> FileIO:
        """A sealed memory file by its number of arrival, from 0 on, which the caller closes. Its sender shares its
        position, so read it by `os.pread`. Raises KeyError, and Unsealed for another descriptor, which is closed.
        """
        fd = self._free.pop(number)
        try:
            check_sealed(fd)
            return FileIO(fd)
        except BaseException:
            os.close(fd)  # it is in the table no more
            raise

    def close(self) -> None:
        while self._free:
            os.close(self._free.popitem()[1])


def check_sealed(fd: int) -> None:
    """Raises Unsealed unless a descriptor is a readable memory file of this user that nobody can change any more."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise Unsealed("it must be a memory file (memfd_create) of the server's own user")
    try:
        seals = fcntl.fcntl(fd, getattr(fcntl, "F_GET_SEALS", _F_GET_SEALS))
    except OSError:
        raise Unsealed("it must be a memory file (memfd_create)") from None
    if missing := [name for name, bit in _SEALS.items() if not seals & bit]:
        raise Unsealed(f"it can still change: seal it with {' | '.join(missing)}")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise Unsealed("it must be opened for reading")


@contextmanager
def unix_listener(path: Path) -> Iterator[socket.socket]:
    """A socket bound to a path, for this user only; it listens once its owner says so. The path is removed at the end.

    A socket that an ended process left there is replaced. Raises OSError if another process listens there, or if the
    path is something else.
    """
    _remove_abandoned(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(str(path))
        try:
            os.chmod(path, MODE)  # nobody can connect before it listens
            yield bound
        finally:
            with suppress(OSError):
                path.unlink()


def _remove_abandoned(path: Path) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(17, "the path exists and is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            try:
                asked.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise FileExistsError(17, "another process listens there")
