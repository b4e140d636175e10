"""Uploaded adapters: each is in a directory named by a hash of its files, which is complete or does not exist.

An upload is staged in a temporary directory, and gets its final name atomically once all of it is on disk. Several
processes may share one root: a process locks the directories that it writes or holds.
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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ..tensor_file import FileIdentity
from .file_copy import FileCopy
from .spare_file import SpareFile

log = logging.getLogger(__name__)

DRAFT, GONE = ".draft-", ".gone-"
ROOM_FILE = ".room"
"""A file of a staged upload; it is as long as the bytes reserved for the upload."""

ROOM_STEP = 16 << 20
"""Most bytes that are written at once without being counted from the start."""

CONTENT_NAME = re.compile(r"[0-9a-f]{64}")
"""The name of a complete directory."""


class TooLarge(ValueError):
    """An adapter has more bytes than the limit for one."""


class StoreFull(RuntimeError):
    """There is no room for more bytes until adapters are removed."""


class ContentStore:
    """Directories below `root`; thread-safe, but its methods wait for the disk.

    max_bytes: limit of one adapter. max_total_bytes: limit of all together. Raises OSError if the root can't be used.
    """

    folders: tuple[str, ...] = ("",)
    """The directories below the root whose content counts."""

    spare: SpareFile | None = None
    """What was removed last, where it is kept; it gives way as soon as its bytes are needed."""

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

    def draft(self, expected: int = 0, known_later: Collection[str] = ()) -> StagedUpload:
        """Stage an empty upload, in a `with` block. Raises StoreFull.

        expected: bytes reserved from the start, so concurrent uploads don't take them from each other. known_later:
        files that are not hashed as they are written, because `seal` gets a hash of what is in them.
        """
        self.reserve(expected)
        return StagedUpload(self, expected, known_later)

    def directories(self) -> list[Path]:
        """Complete directories."""
        return [path for path in self.root.iterdir() if CONTENT_NAME.fullmatch(path.name)]

    @property
    def num_bytes(self) -> int:
        """Bytes in use, staged uploads included."""
        with self._counting():
            return self._read_count()

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for bytes that will be written. Raises StoreFull, reserving nothing, if there is too little."""
        with self._counting():
            used = self._read_count()
            if self.spare is not None and used + num_bytes + self.spare.num_bytes > self._max_total_bytes:
                self.spare.drop()
            if used + num_bytes > self._max_total_bytes or used >= self._max_total_bytes:
                raise StoreFull(
                    f"uploaded adapters take {used} of the {self._max_total_bytes} bytes that they may use; "
                    "remove some, or raise --max-uploaded-bytes"
                )
            self._write_count(used + num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Free reserved room."""
        with self._counting():
            self._write_count(self._read_count() - num_bytes)

    def recount(self) -> None:
        """Count the bytes on disk: processes that were killed have freed nothing."""
        with self._counting():
            found = [path for folder in self.folders for path in _directories(self.root / folder)]
            self._write_count(sum(map(_bytes_taken, found)))

    def remove_unused(self, is_used: Callable[[list[Path]], Collection[Path]]) -> None:
        """Remove directories that `is_used` does not return; it is called with those that no staged upload holds."""
        found = [path for path in self.directories() if not _is_held(path)]
        used = is_used(found) if found else ()
        for path in found:
            if path not in used:
                self.remove(path)

    def remove(self, path: Path) -> bool:
        """Remove a directory, unless a staged upload holds it; return True if it was removed."""
        gone = Path(tempfile.mkdtemp(prefix=GONE, dir=self.root))
        moved = self._move(path, gone / path.name)  # atomically, so no reader finds half of it
        if moved:
            self.give_back(bytes_of(gone / path.name))
            if self.spare is not None:
                self.spare.keep(gone / path.name)
        shutil.rmtree(gone, ignore_errors=True)
        return moved

    def hold(self, draft: Path, path: Path) -> tuple[int, bool]:
        """Give a staged upload its final name, unless the same files already exist.

        Return a descriptor that holds the directory until it is closed, and whether the directory is the upload's own.
        """
        with self._counting():
            is_new = False
            with suppress(OSError):
                draft.rename(path)
                is_new = True
            try:
                held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise OSError(error.errno, f"{path} can't be created: {error.strerror}") from None
            fcntl.flock(held, fcntl.LOCK_SH)
        _sync(self.root)
        return held, is_new

    def on_unused(self, path: Path) -> None:
        """Called when an upload created a directory and failed later, so nothing may need the directory."""

    def _move(self, path: Path, to: Path) -> bool:
        """Rename a directory that no staged upload holds; return False if one does, or the directory does not exist."""
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
        """Exclude all others that use the count."""
        with self._lock:
            yield

    def _read_count(self) -> int:
        return self._used

    def _write_count(self, value: int) -> None:
        self._used = max(0, value)


class StagedUpload:
    """Files being written, in a `with` block. Without `seal` they are removed at its end.

    With `seal` they are kept at least that long, even if nothing uses them yet. Calls run one at a time.
    """

    def __init__(self, store: ContentStore, reserved: int, known_later: Collection[str] = ()) -> None:
        """reserved: bytes reserved for it. known_later: see `ContentStore.draft`."""
        self._store = store
        self._known_later = known_later
        self._reserved = reserved
        self._sealed: tuple[Path, bool] | None = None
        self._held: int | None = None
        self._path = Path(tempfile.mkdtemp(prefix=DRAFT, dir=store.root))
        self._lock = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        with (self._path / ROOM_FILE).open("wb") as room:
            room.truncate(reserved)  # a sparse file takes no room itself
        self._files: dict[str, tuple[BinaryIO, hashlib._Hash | None]] = {}
        self._copies: dict[str, FileCopy] = {}
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
        """Stop writing and release the files. failed: nothing may need the sealed directory."""
        for copy in list(self._copies.values()):
            copy.stop()  # a `seal` that waits for it has the lock
        with self._busy:
            if not self._is_over:
                self._is_over = True
                self._end(failed=failed)

    def _end(self, *, failed: bool) -> None:
        for file, _ in self._files.values():
            with suppress(OSError):
                file.close()
        for copy in self._copies.values():
            copy.close()
        sealed, is_new = self._sealed or (None, False)
        if not is_new:
            shutil.rmtree(self._path, ignore_errors=True)
        try:
            self._store.give_back(self._reserved - (self.num_bytes if is_new else 0))
            if sealed is not None and is_new and failed:
                self._store.on_unused(sealed)
        except OSError as error:  # the bytes are recounted later, and a directory without a name is set aside
            log.warning("the end of an upload could not be recorded: %s", error)
        finally:
            for fd in (self._lock, self._held):
                if fd is not None:
                    os.close(fd)

    @property
    def names(self) -> Collection[str]:
        """Names of the files."""
        return self._files.keys() | self._copies.keys()

    def copied(self, name: str) -> FileIdentity | None:
        """The identity of what a file of the sealed directory was copied from; None if it wasn't, or lay there."""
        copy, (_, is_new) = self._copies.get(name), self._sealed or (None, False)
        return copy.identity if copy is not None and is_new else None

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Append to a file. Raises TooLarge, StoreFull and OSError."""
        with self._busy:
            self._write(name, data)

    def copy_beside(self, name: str, source: FileIO) -> Callable[[], None]:
        """Have a file be a copy of one that nobody changes any more; it can be read at once, see `FileCopy`. name: of a
        file that is `known_later`, and new. Returns what copies it, to be called on another thread.

        Raises as `write`, and ValueError if that file was closed before.
        """
        with self._busy:
            if name in self.names or name not in self._known_later:
                raise ValueError(f"{name} is written already, or hashed as it is written")
            self._reserve(os.fstat(source.fileno()).st_size)
            if self._store.spare is not None:
                self._store.spare.take(self._path / name)
            self._copies[name] = copy = FileCopy(self._path / name, source)
            return copy.run

    def _write(self, name: str, data: bytes | memoryview) -> None:
        file, digest = self._file(name, len(data))
        file.write(data)
        if digest is not None:
            digest.update(data)

    def _file(self, name: str, more: int) -> tuple[BinaryIO, hashlib._Hash | None]:
        """A file that so many bytes are appended to, which are counted."""
        self._reserve(more)
        if name not in self._files:
            digest = None if name in self._known_later else hashlib.sha256()
            if digest is None and self._store.spare is not None:
                self._store.spare.drop()  # which is for copies: the disk may have no room for both
            self._files[name] = (self._path / name).open("xb"), digest
        return self._files[name]

    def _reserve(self, more: int) -> None:
        """Count bytes that are going to be there. Raises TooLarge, StoreFull and OSError."""
        self._require_open()
        if self.num_bytes + more > self._store.max_bytes:
            raise TooLarge(f"the adapter has more than the {self._store.max_bytes} bytes allowed")
        if (lacking := self.num_bytes + more - self._reserved) > 0:
            self._store.reserve(lacking)
            self._reserved += lacking
            if lacking > ROOM_STEP:  # before the bytes are there, others must count them
                os.truncate(self._path / ROOM_FILE, self._reserved)
        self.num_bytes += more

    @property
    def max_bytes(self) -> int:
        """The most that it may have."""
        return self._store.max_bytes

    def directory(self) -> Path:
        """Where all that was written can be read until `seal`."""
        with self._busy:
            self._require_open()
            for file, _ in self._files.values():
                file.flush()
            return self._path

    def seal(self, hashes: Mapping[str, str] | None = None) -> Path:
        """Move the files to their final directory and return it; if they already exist there, return that one. hashes:
        of the files that were to be `known_later`, by name.
        """
        with self._busy:
            self._require_open()
            return self._seal(hashes or {})

    def _require_open(self) -> None:
        if self._is_over:
            raise OSError("the upload has ended")

    def _seal(self, hashes: Mapping[str, str]) -> Path:
        content = hashlib.sha256()
        for name in sorted(self.names):
            content.update(f"{name}\0{self._settled(name, hashes)}\n".encode())
        path = self._store.root / content.hexdigest()
        (self._path / ROOM_FILE).unlink(missing_ok=True)
        os.fsync(self._lock)
        self._held, is_new = self._store.hold(self._path, path)
        self._sealed = path, is_new
        return path

    def _settled(self, name: str, hashes: Mapping[str, str]) -> str:
        """Have a file be whole, and on the disk; returns its hash."""
        if (copy := self._copies.get(name)) is not None:
            copy.finish()
            return hashes[name]
        file, digest = self._files[name]
        file.flush()
        os.fsync(file.fileno())
        return hashes[name] if digest is None else digest.hexdigest()


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _directories(folder: Path) -> list[Path]:
    """Directories of content, complete or being written."""
    with suppress(FileNotFoundError):
        return [one for one in folder.iterdir() if CONTENT_NAME.fullmatch(one.name) or one.name.startswith(DRAFT)]
    return []


def _bytes_taken(directory: Path) -> int:
    """Bytes of a directory's files, or the reserved bytes of a staged upload."""
    room = 0
    with suppress(FileNotFoundError):
        room = (directory / ROOM_FILE).stat().st_size
    return max(room, bytes_of(directory) - room)


def bytes_of(directory: Path) -> int:
    """Bytes of a directory's files; 0 if it does not exist."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sum(entry.stat().st_size for entry in os.scandir(directory))
    return 0


def _is_held(path: Path) -> bool:
    """True if a staged upload holds a directory, or it is gone."""
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
    """Remove a staged upload whose process has ended."""
    with suppress(OSError):
        fd = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(draft)
        finally:
            os.close(fd)
