"""The cache of downloaded adapters: bounded, and shared by the processes of one server.

Files are stored in a `ContentStore`; below `index`, a file for each name records the contents of its location. An index
file's modification time is the time of the adapter's last use.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...memory.files.uploads.content_store import ContentStore, StagedUpload, bytes_of
from .rules import Location


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A name's adapter in the cache."""

    name: str
    path: Path
    index: Path
    used: float


class Cache:
    """For any thread. Raises OSError if the directory can't be used."""

    def __init__(self, directory: Path, max_bytes: int, max_adapter_bytes: int) -> None:
        """max_bytes: of all files, not counting downloads in progress."""
        self.content = ContentStore(directory, max_adapter_bytes, sys.maxsize)
        self.directory = self.content.root
        self._index = self.directory / "index"
        self._index.mkdir(exist_ok=True)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def find(self, name: str, location: Location) -> Path | None:
        """The directory of an adapter that is in the cache."""
        entry = self._read(self._index_file(name, location))
        return None if entry is None else entry.path

    def publish(self, draft: StagedUpload, name: str, location: Location) -> Path:
        """Make a complete download the adapter of a name; returns its directory."""
        with self._locked():
            path = draft.seal()
            index = self._index_file(name, location)
            new = index.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps({"name": name, "content": path.name}), encoding="utf-8")
            new.replace(index)
        return path

    def forget(self, name: str, location: Location) -> None:
        """Have the adapter downloaded again the next time; its files stay until their space is needed."""
        self._index_file(name, location).unlink(missing_ok=True)

    def remove(self, entries: list[CacheEntry]) -> None:
        """Remove the adapters with these names, and all files without a name."""
        with self._locked():
            for entry in entries:
                entry.index.unlink(missing_ok=True)
            self.content.remove_unused(lambda _: [entry.path for entry in self.entries()])

    def excess(self) -> int:
        """Bytes to remove to make room."""
        return sum(bytes_of(path) for path in self.content.directories()) - self._max_bytes

    def touch(self, name: str, location: Location) -> None:
        """Note that an adapter is used."""
        with suppress(OSError):
            os.utime(self._index_file(name, location))

    def entries(self) -> list[CacheEntry]:
        """All names, the least recently used first."""
        found = (self._read(index) for index in self._index.glob("*.json"))
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.used)

    def _read(self, index: Path) -> CacheEntry | None:
        with suppress(OSError, ValueError, KeyError):
            text = json.loads(index.read_bytes())
            path = self.directory / text["content"]
            if path.is_dir():
                return CacheEntry(text["name"], path, index, index.stat().st_mtime)
        return None

    def _index_file(self, name: str, location: Location) -> Path:
        key = "\0".join((name, location.url, location.sha256 or ""))
        return self._index / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes other threads and processes: no files are removed between their arrival and their index entry."""
        with self._lock, (self.directory / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
