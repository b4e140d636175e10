"""The directory of a cluster: addresses, secrets, and files that its processes exchange.

Tests: tests/server/cluster/test_processes.py
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from .address import AddressFile
from .child import Child
from .link import Link
from .listener import Listener
from .stream import new_secret, read_secret


class ClusterDirectory:
    """Addresses and secrets of a cluster, in a directory that only this user may enter."""

    _PREFIX, _LOCK = "chorus-", "lock"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secret_file = path / "secret"
        self.settings_file = path / "replica.json"
        self.given_file = path / "api-server.json"
        self.registry_file = path / "registry.address"
        self._locked: IO[str] | None = None
        self._count_file = path / "replicas"

    @classmethod
    def new(cls, secret_file: Path | None = None) -> ClusterDirectory:
        """A directory that is locked while this object lives. Directories of killed processes are removed.

        secret_file: of a secret that machines share; None: a new secret.
        """
        cls._remove_abandoned()
        # a socket's path has at most 107 bytes, which a user's choice of name might exceed
        directory = cls(Path(tempfile.mkdtemp(prefix=cls._PREFIX)))
        draft = directory.path / "lock.draft"  # no other process finds it before it is locked
        directory._locked = draft.open("w")
        fcntl.flock(directory._locked, fcntl.LOCK_EX)
        draft.rename(directory.path / cls._LOCK)
        if secret_file is None:
            new_secret(directory.secret_file)
        else:
            directory.secret_file.symlink_to(secret_file.absolute())
        return directory

    @classmethod
    def _remove_abandoned(cls) -> None:
        for file in Path(tempfile.gettempdir()).glob(f"{cls._PREFIX}*/{cls._LOCK}"):
            with suppress(OSError):  # its process lives, or another one removes it
                if file.parent.lstat().st_uid == os.getuid():
                    with file.open() as lock:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(file.parent)

    @property
    def secret(self) -> bytes:
        return read_secret(self.secret_file)

    def socket(self, name: str) -> str:
        """Address of the unix socket of a process."""
        return f"unix:{self.path / name}.sock"

    def replica_file(self, index: int) -> Path:
        """The file with the address of a replica."""
        return self.path / f"r{index}.address"

    def ready_file(self, api_server: int) -> Path:
        """The file that an API server creates once it listens for the first time."""
        return self.path / f"f{api_server}.ready"

    def stuck_file(self, name: str) -> Path:
        """The file in which an API server names a replica's process that hangs."""
        return self.path / f"{name}.stuck"

    @property
    def num_replicas(self) -> int:
        """Number of replicas wanted now, counted from `r0`; more replicas may still have files."""
        return int(self._count_file.read_text())

    def tell_replicas(self, count: int) -> None:
        _replace(self._count_file, str(count))

    def hint(self, api_server: int) -> tuple[int, int] | None:
        """An API server's scale hint and the number of replicas that it refers to; None before the first."""
        with suppress(FileNotFoundError):
            hint, about = map(int, self._hint_file(api_server).read_text().split())
            return hint, about
        return None

    def tell_hint(self, api_server: int, hint: int, about: int) -> None:
        if self.hint(api_server) != (hint, about):
            _replace(self._hint_file(api_server), f"{hint} {about}")

    def _hint_file(self, api_server: int) -> Path:
        return self.path / f"f{api_server}.hint"

    def links(self, count: int, silent_seconds: float, tls: Path | None = None) -> list[Link]:
        """Links to so many replicas."""
        addresses = [AddressFile(self.replica_file(index), tls) for index in range(count)]
        return [Link(f"r{index}", one, self.secret, silent_seconds) for index, one in enumerate(addresses)]

    def replica(self, name: str, listen: str, address_file: Path, tls: Path | None, settings: str) -> Child:
        """A replica's process on this machine. settings: as JSON."""
        self.settings_file.write_text(settings)
        listener = Listener(listen, self.secret_file, address_file, tls)
        command = ["replica", *listener.flags(), "--settings", str(self.settings_file)]
        return Child(f"replica {name}", command, address_file)


def _replace(file: Path, text: str) -> None:
    """Write a file atomically: readers see the old content or all of the new one."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)
