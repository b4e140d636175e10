"""Adapters that came as bytes: each in a directory named by the SHA-256 of its files, which is whole or not there.

A draft is written beside the others, under a name of its own, and gets its final name in one step once all of it is on
the disk. Several processes may use one root: who writes or holds a directory has it locked.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

log = logging.getLogger(__name__)

DRAFT, GONE = ".draft-", ".gone-"
ROOM_FILE = ".room"
"""File of a draft that is as long as the bytes that it has room for."""

CONTENT_NAME = re.compile(r"[0-9a-f]{64}")
"""The name of a whole directory."""


class TooLarge(ValueError):
    """One adapter has more bytes than may be kept of it."""


class StoreFull(RuntimeError):
    """There is no room for further bytes until adapters are removed."""


class ContentStore:
    """Directories below `root`; of any thread, but it waits for the disk.

    max_bytes: of one adapter. max_total_bytes: of all of them. Raises OSError where the root can't be used.
    """

    places: tuple[str, ...] = ("",)
    """Directories below the root whose content counts."""

    def __init__(self, root: Path, max_bytes: int, max_total_bytes: int) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()
        self.max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._lock = threading.Lock()
        self._used = 0
        for left in (*self.root.glob(f"{DRAFT}*"), *self.root.glob(f"{GONE}*")):
            _remove_unless_written(left)
        self.recount()

    def draft(self, expected: int = 0) -> StagedUpload:
        """An empty draft, for a `with` block. expected: bytes that it has room for from the start, so that drafts that
        are written at once don't take it from each other. StoreFull.
        """
        self.reserve(expected)
        return StagedUpload(self, expected)

    def directories(self) -> list[Path]:
        """Directories that are whole."""
        return [path for path in self.root.iterdir() if CONTENT_NAME.fullmatch(path.name)]

    @property
    def num_bytes(self) -> int:
        """Bytes in use, drafts included."""
        with self._counting():
            return self._read_count()

    def reserve(self, num_bytes: int) -> None:
        """Take room for bytes that are to be written. StoreFull: nothing is taken."""
        with self._counting():
            used = self._read_count()
            if used + num_bytes > self._max_total_bytes or used >= self._max_total_bytes:
                raise StoreFull(
                    f"adapters sent as bytes take {used} of the {self._max_total_bytes} bytes there are for them; "
                    "remove some, or raise --max-uploaded-bytes"
                )
            self._write_count(used + num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Free room that was taken."""
        with self._counting():
            self._write_count(self._read_count() - num_bytes)

    def recount(self) -> None:
        """Count what is on the disk: processes that were killed have given nothing back."""
        with self._counting():
            found = [path for place in self.places for path in _directories(self.root / place)]
            self._write_count(sum(map(_bytes_taken, found)))

    def remove_unused(self, is_used: Callable[[list[Path]], Collection[Path]]) -> None:
        """Remove directories of which `is_used` does not return; it is asked for the ones that no draft holds."""
        found = [path for path in self.directories() if not _is_held(path)]
        used = is_used(found) if found else ()
        for path in found:
            if path not in used:
                self.remove(path)

    def remove(self, path: Path) -> bool:
        """Remove a directory, unless a draft holds it; True if it was removed."""
        gone = Path(tempfile.mkdtemp(prefix=GONE, dir=self.root))
        moved = self._move(path, gone / path.name)  # in one step: no reader finds half of it
        if moved:
            self.give_back(bytes_of(gone / path.name))
        shutil.rmtree(gone, ignore_errors=True)
        return moved

    def hold(self, draft: Path, path: Path) -> tuple[int, bool]:
        """Give a draft's directory its final name, unless the same files are there already; a descriptor that holds the
        directory until it is closed, and whether it is the draft's.
        """
        with self._counting():
            is_new = False
            with suppress(OSError):
                draft.rename(path)
                is_new = True
            try:
                held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise OSError(error.errno, f"{path} can't be made: {error.strerror}") from None
            fcntl.flock(held, fcntl.LOCK_SH)
        _sync(self.root)
        return held, is_new

    def on_unused(self, path: Path) -> None:
        """A draft made a directory and failed behind that, so that nothing may need it."""

    def _move(self, path: Path, to: Path) -> bool:
        """Rename a directory that no draft holds; False if one does, or there is none."""
        with self._counting():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.rename(to)
            except BlockingIOError:
                return False
            finally:
                os.close(fd)
        return True

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Alone among all who use the count."""
        with self._lock:
            yield

    def _read_count(self) -> int:
        return self._used

    def _write_count(self, value: int) -> None:
        self._used = max(0, value)


class StagedUpload:
    """Files that are being written, in a `with` block; without `seal` they are gone at its end, and with it they are
    kept that long at least, though nothing uses them yet. Calls follow each other.
    """

    def __init__(self, store: ContentStore, reserved: int) -> None:
        """reserved: bytes that were taken for it."""
        self._store = store
        self._reserved = reserved
        self._sealed: tuple[Path, bool] | None = None
        self._held: int | None = None
        self._path = Path(tempfile.mkdtemp(prefix=DRAFT, dir=store.root))
        self._lock = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        with (self._path / ROOM_FILE).open("wb") as room:
            room.truncate(reserved)  # takes no room itself
        self._files: dict[str, tuple[BinaryIO, hashlib._Hash]] = {}
        self._is_over = False
        self._busy = threading.Lock()
        self.num_bytes = 0

    def __enter__(self) -> StagedUpload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(failed=kind is not None)

    def end(self, *, failed: bool = False) -> None:
        """Write and hold no more. failed: nothing may need what was sealed."""
        with self._busy:
            if not self._is_over:
                self._is_over = True
                self._end(failed=failed)

    def _end(self, *, failed: bool) -> None:
        for file, _ in self._files.values():
            with suppress(OSError):
                file.close()
        sealed, is_new = self._sealed or (None, False)
        if not is_new:
            shutil.rmtree(self._path, ignore_errors=True)
        try:
            self._store.give_back(self._reserved - (self.num_bytes if is_new else 0))
            if sealed is not None and is_new and failed:
                self._store.on_unused(sealed)
        except OSError as error:  # the bytes are counted again later, and what no name means is set aside
            log.warning("the end of an upload could not be written down: %s", error)
        finally:
            for fd in (self._lock, self._held):
                if fd is not None:
                    os.close(fd)

    @property
    def names(self) -> Collection[str]:
        """Names of the files."""
        return self._files.keys()

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Append to a file. TooLarge, StoreFull, OSError."""
        with self._busy:
            self._write(name, data)

    def _write(self, name: str, data: bytes | memoryview) -> None:
        self._require_open()
        if self.num_bytes + len(data) > self._store.max_bytes:
            raise TooLarge(f"the adapter has more than the {self._store.max_bytes} bytes that are taken of one")
        if (more := self.num_bytes + len(data) - self._reserved) > 0:
            self._store.reserve(more)
            self._reserved += more
        self.num_bytes += len(data)
        if name not in self._files:
            self._files[name] = (self._path / name).open("xb"), hashlib.sha256()
        file, digest = self._files[name]
        file.write(data)
        digest.update(data)

    def seal(self) -> Path:
        """Give the files their final directory; if the same files are there already, that one."""
        with self._busy:
            self._require_open()
            return self._seal()

    def _require_open(self) -> None:
        if self._is_over:
            raise OSError("the draft has ended")

    def _seal(self) -> Path:
        content = hashlib.sha256()
        for name, (file, digest) in sorted(self._files.items()):
            file.flush()
            os.fsync(file.fileno())
            content.update(f"{name}\0{digest.hexdigest()}\n".encode())
        path = self._store.root / content.hexdigest()
        (self._path / ROOM_FILE).unlink(missing_ok=True)
        os.fsync(self._lock)
        self._held, is_new = self._store.hold(self._path, path)
        self._sealed = path, is_new
        return path


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _directories(place: Path) -> list[Path]:
    """Directories of content, whole or being written."""
    with suppress(FileNotFoundError):
        return [one for one in place.iterdir() if CONTENT_NAME.fullmatch(one.name) or one.name.startswith(DRAFT)]
    return []


def _bytes_taken(directory: Path) -> int:
    """Bytes of a directory's files, or as many as a draft has room for."""
    room = 0
    with suppress(FileNotFoundError):
        room = (directory / ROOM_FILE).stat().st_size
    return max(room, bytes_of(directory) - room)


def bytes_of(directory: Path) -> int:
    """Bytes of a directory's files; 0 where there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sum(entry.stat().st_size for entry in os.scandir(directory))
    return 0


def _is_held(path: Path) -> bool:
    """True if a draft holds a directory, or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
    except (FileNotFoundError, BlockingIOError):
        return True
    return False


def _remove_unless_written(draft: Path) -> None:
    """Remove what a process that has ended left behind."""
    with suppress(OSError):
        fd = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(draft)
        finally:
            os.close(fd)
