"""Adapters that came as bytes: each in a directory named by the SHA-256 of its files, which is whole or not there.

A draft is written beside the others, under a name of its own, and gets its final name in one step once all of it is on
the disk. Several processes may use one root.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

DRAFT = ".draft-"
_NAME = re.compile(r"[0-9a-f]{64}")


class TooLarge(ValueError):
    """One adapter has more bytes than may be kept of it."""


class StoreFull(RuntimeError):
    """There is no room for further bytes until adapters are removed."""


class ContentStore:
    """Directories below `root`; of any thread.

    max_bytes: of one adapter. max_total_bytes: of all of them. Raises OSError where the root can't be used.
    """

    def __init__(self, root: Path, max_bytes: int, max_total_bytes: int) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()
        self.max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._lock = threading.Lock()
        self._held: Counter[Path] = Counter()
        for draft in self.root.glob(f"{DRAFT}*"):
            _remove_unless_written(draft)

    def draft(self) -> Draft:
        """An empty draft, for a `with` block. StoreFull."""
        room = self._max_total_bytes - sum(bytes_of(path) for path in self.directories())
        if room <= 0:
            raise StoreFull(f"adapters sent as bytes take all of the {self._max_total_bytes} bytes there are for them")
        return Draft(self, room)

    def directories(self) -> list[Path]:
        """Directories that are whole."""
        return [path for path in self.root.iterdir() if _NAME.fullmatch(path.name)]

    def remove_unused(self, is_used: Callable[[list[Path]], Collection[Path]]) -> None:
        """Remove directories of which `is_used` does not return; it is asked for the ones that no draft holds."""
        with self._lock:  # a directory is held until it is used, so that none falls between the two looks
            found = [path for path in self.directories() if not self._held[path]]
            used = is_used(found) if found else ()
            for path in found:
                if path not in used:
                    gone = Path(tempfile.mkdtemp(prefix=DRAFT, dir=self.root)) / path.name
                    path.rename(gone)  # in one step: no reader finds half of it
                    shutil.rmtree(gone.parent, ignore_errors=True)

    def take(self, draft: Path, path: Path) -> None:
        """Give a draft's directory its final name, unless the same files are there already, and hold it."""
        with self._lock:
            with suppress(OSError):
                draft.rename(path)
            if not path.is_dir():
                raise OSError(f"{path} can't be made")
            self._held[path] += 1
        _sync(self.root)

    def release(self, path: Path) -> None:
        """Hold a directory no more."""
        with self._lock:
            self._held[path] -= 1


class Draft:
    """Files that are being written, in a `with` block; without `seal` they are gone at its end, and with it they are
    kept that long at least, though nothing uses them yet. Of one thread at a time.
    """

    def __init__(self, store: ContentStore, room: int) -> None:
        self._store = store
        self._room = room
        self._sealed: Path | None = None
        self._path = Path(tempfile.mkdtemp(prefix=DRAFT, dir=store.root))
        self._lock = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._files: dict[str, tuple[BinaryIO, hashlib._Hash]] = {}
        self.num_bytes = 0

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file, _ in self._files.values():
            with suppress(OSError):
                file.close()
        os.close(self._lock)
        shutil.rmtree(self._path, ignore_errors=True)
        if self._sealed is not None:
            self._store.release(self._sealed)

    @property
    def names(self) -> Collection[str]:
        """Names of the files."""
        return self._files.keys()

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Append to a file. TooLarge, StoreFull, OSError."""
        self.num_bytes += len(data)
        if self.num_bytes > self._store.max_bytes:
            raise TooLarge(f"the adapter has more than the {self._store.max_bytes} bytes that are taken of one")
        if self.num_bytes > self._room:
            raise StoreFull(f"there is room for {self._room} bytes of further adapters; remove some")
        if name not in self._files:
            self._files[name] = (self._path / name).open("xb"), hashlib.sha256()
        file, digest = self._files[name]
        file.write(data)
        digest.update(data)

    def seal(self) -> Path:
        """Give the files their final directory; if the same files are there already, that one."""
        content = hashlib.sha256()
        for name, (file, digest) in sorted(self._files.items()):
            file.flush()
            os.fsync(file.fileno())
            content.update(f"{name}\0{digest.hexdigest()}\n".encode())
        path = self._store.root / content.hexdigest()
        os.fsync(self._lock)
        self._store.take(self._path, path)
        self._sealed = path
        return path


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def bytes_of(directory: Path) -> int:
    """Bytes of a directory's files; 0 where there is none."""
    with suppress(FileNotFoundError):
        return sum(entry.stat().st_size for entry in os.scandir(directory))
    return 0


def _remove_unless_written(draft: Path) -> None:
    """Remove what a process that has ended left behind."""
    with suppress(OSError):
        fd = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(draft)
        finally:
            os.close(fd)
