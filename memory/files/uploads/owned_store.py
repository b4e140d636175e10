"""Uploads of one server or cluster: a content store that removes only the content that its owner has retired.

A retired version leaves a tombstone, and its directory is removed once nothing uses it. A directory without a name and
without a tombstone is an orphan. Names may have been lost, so it is moved to `lost` and kept for days.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from .content_store import CONTENT_NAME, GONE, ContentStore
from .spare_file import SPARE_SECONDS, SpareFile

log = logging.getLogger(__name__)

OWNER_FILE, COUNT_FILE, LOST, TOMBSTONE = "owner.json", "bytes", "lost", ".retired"
COUNT_BYTES = 8

ORPHAN_SECONDS = 60.0
"""Seconds until a directory without a name is moved: another process may be about to register it."""

LOST_SECONDS = 7 * 86400.0
"""Seconds for which a directory is kept in `lost`."""

RECOUNT_SECONDS = 60.0
CLAIM_SECONDS = 5.0
CLAIM_POLL_SECONDS = 0.05


class OtherOwner(RuntimeError):
    """The directory belongs to another server or cluster; the message names it and says how to fix it."""


class Owner(NamedTuple):
    """The user of a directory."""

    identity: str
    """Identity of the file that keeps its names."""
    is_shared: bool = False
    """True if several processes use the directory at once."""
    takes_over: bool = False
    """True if the names were lost, and this is their new file."""


class OwnedStore(ContentStore):
    """A content store with an owner, see the module. A cluster's processes may share it; a file counts bytes."""

    folders = ("", LOST)

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        max_total_bytes: int,
        owner: Owner,
        *,
        grace_seconds: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """grace_seconds: how long a retired directory must be unused before it is removed. Raises OtherOwner for a
        directory that another owner has or uses.
        """
        root.mkdir(parents=True, exist_ok=True)
        self.owner = owner.identity
        self._owner_fd = _claim(root / OWNER_FILE, owner)
        self._count = os.open(root / COUNT_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._sweeping = threading.Lock()
        self._is_closed = False
        self._unused: dict[str, float] = {}  # since when
        super().__init__(root, max_bytes, max_total_bytes)
        if not owner.is_shared:  # its bytes are known to this process alone
            self.spare = SpareFile(self.root, GONE, clock)
        self._counted_at = clock()

    def close(self) -> None:
        """Release the directory for others."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                if self.spare is not None:
                    self.spare.close()
                os.close(self._owner_fd)
                os.close(self._count)

    def retire(self, paths: Iterable[Path]) -> None:
        """Write tombstones for directories whose names now mean others."""
        for path in paths:
            if CONTENT_NAME.fullmatch(path.name):
                self._tombstone(path.name).touch()

    def on_unused(self, path: Path) -> None:
        self.retire([path])

    def find(self, path: Path) -> Path:
        """Find a named directory: in the present root, even if registered in another, or brought back from `lost`."""
        if not CONTENT_NAME.fullmatch(path.name):
            return path
        here = self.root / path.name
        if not here.is_dir():
            with suppress(OSError):
                (self.root / LOST / path.name).rename(here)
                log.warning("%s was lost and is back, because a name needs it", here)
        return here if here.is_dir() else path

    def sweep(self, names: Callable[[], Collection[str]], used: Callable[[], Collection[str]]) -> None:
        """Remove retired directories, and move orphans.

        names: returns the directories that adapters' names mean. used: returns those that requests hold, too.
        """
        with self._sweeping:
            self._sweep(names, used)
            if self.spare is not None:
                self.spare.drop(older_than=SPARE_SECONDS)

    def _sweep(self, names: Callable[[], Collection[str]], used: Callable[[], Collection[str]]) -> None:
        retired = {path.name.removesuffix(TOMBSTONE) for path in self.root.glob(f"*{TOMBSTONE}")}
        named = set(names())  # read after the tombstones: whatever has both was named again after it was retired
        found = {path.name for path in self.directories()}
        for name in retired & named | retired - found:
            self._forget(name)
        unnamed = found - named
        unused = unnamed - set(used()) if unnamed else unnamed
        now = self._clock()
        self._unused = {name: self._unused.get(name, now) for name in unused}
        for name, since in self._unused.items():
            if name in retired and now - since >= self._grace_seconds:
                if self.remove(self.root / name):
                    self._forget(name)
            elif name not in retired and now - since >= ORPHAN_SECONDS:
                self._set_aside(name)
        self._expire(now)
        if not 0 <= now - self._counted_at < RECOUNT_SECONDS:
            self._counted_at = now
            self.recount()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:  # its descriptor may belong to another file by now
                raise OSError(f"{self.root} is closed")
            fcntl.flock(self._count, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._count, fcntl.LOCK_UN)

    def _read_count(self) -> int:
        return int.from_bytes(os.pread(self._count, COUNT_BYTES, 0), "little")

    def _write_count(self, value: int) -> None:
        os.pwrite(self._count, max(0, value).to_bytes(COUNT_BYTES, "little"), 0)

    def _set_aside(self, name: str) -> None:
        to = self.root / LOST / name
        to.parent.mkdir(exist_ok=True)
        if to.exists() or not self._move(self.root / name, to):
            return
        os.utime(to, (self._clock(), self._clock()))
        log.warning(
            "%s belongs to no adapter and was not retired: it is kept in %s for %d days; load it again from there, "
            "or restore the file of names and restart",
            self.root / name,
            to,
            LOST_SECONDS / 86400,
        )

    def _expire(self, now: float) -> None:
        for path in (self.root / LOST).glob("*"):
            if CONTENT_NAME.fullmatch(path.name) and now - path.stat().st_mtime > LOST_SECONDS and self.remove(path):
                log.warning("%s was lost for %d days and was removed", path, LOST_SECONDS / 86400)

    def _tombstone(self, name: str) -> Path:
        return self.root / f"{name}{TOMBSTONE}"

    def _forget(self, name: str) -> None:
        self._tombstone(name).unlink(missing_ok=True)


def _claim(file: Path, owner: Owner) -> int:
    """Lock the directory for an owner, store the owner's identity, and return the descriptor. Raises OtherOwner."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + CLAIM_SECONDS
        while not _try_claim(fd, file, owner):
            if time.monotonic() >= deadline:
                raise OtherOwner(
                    f"{file.parent} is in use by another server or cluster; stop that one, or use another directory"
                )
            time.sleep(CLAIM_POLL_SECONDS)
    except OSError as error:  # of a call with a descriptor, which names no file
        os.close(fd)
        raise OSError(error.errno, error.strerror, str(file)) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _try_claim(fd: int, file: Path, owner: Owner) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if owner.is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        try:
            there = _read_owner(fd)
        except ValueError as error:
            if not owner.takes_over:
                raise OtherOwner(
                    f"{file} {error}; restore it from a backup, or remove it if no other server or cluster uses "
                    f"{file.parent}"
                ) from None
            there = ""
        if there == owner.identity:
            return True
        if there is not None and not owner.takes_over:
            raise OtherOwner(
                f"{file.parent} belongs to another server or cluster: its names are in a file with the identity "
                f"{there}, and this one's has {owner.identity}. Restore that file if it was lost, or give another "
                f"directory. To abandon the names of its contents, remove {file}"
            )
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"identity": owner.identity}).encode(), 0)
    os.fsync(fd)
    if owner.is_shared:
        fcntl.flock(fd, fcntl.LOCK_SH)
    return True


def _read_owner(fd: int) -> str | None:
    """The identity of the directory's owner; None for a new file. Raises ValueError for a damaged one."""
    text = os.pread(fd, 4096, 0)
    if not text:
        return None
    try:
        identity = json.loads(text)["identity"]
    except (ValueError, KeyError, TypeError, RecursionError):
        identity = None
    if not isinstance(identity, str) or not identity:
        raise ValueError(f"names no owner: it holds {text[:40]!r}, and must hold a JSON object with an identity")
    return identity
