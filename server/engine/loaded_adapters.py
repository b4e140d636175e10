"""Adapters that came over HTTP, across restarts: files of the ones sent as bytes, and what names meant at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...memory.adapters.registry_store import Entry, RegistryStore
from ...memory.adapters.versions import split_version
from ...memory.files.content_store import ContentStore, Draft
from ...memory.files.error import AdapterFormatError
from ...memory.files.identity import with_content
from ...memory.host.image import HostImage

if TYPE_CHECKING:
    from ..settings import Settings
    from .adapter_book import AdapterBook
    from .backend import Backend
    from .engine_view import AdapterState

log = logging.getLogger(__name__)

NAMES_FILE = "names.sqlite"

SHARED_SECONDS = 60.0
"""Seconds for which a directory that other fronts may use is kept after no name means it: their requests may not have
reached a replica yet."""


class LoadedAdapters:
    """A directory of adapters' files, and a file in it of names; of any thread, one change at a time.

    A cluster's registry keeps the names of its adapters: `names` is None there, and other fronts use the files, too.
    """

    def __init__(self, files: ContentStore, names: RegistryStore | None, clock: Callable[[], float] = time.monotonic):
        self._files = files
        self._names = names
        self._clock = clock
        self._unused: dict[Path, float] = {}  # since when

    @classmethod
    def of(cls, settings: Settings, *, has_registry: bool) -> LoadedAdapters | None:
        """None without a directory. Raises OSError and RegistryError for one that can't be used."""
        if (root := settings.adapter_uploads) is None:
            return None
        root.mkdir(parents=True, exist_ok=True)
        names = (
            None if has_registry else RegistryStore(root / NAMES_FILE)
        )  # first: another server may have the directory
        return cls(ContentStore(root, settings.max_adapter_bytes, settings.max_uploaded_bytes), names)

    @property
    def root(self) -> Path:
        return self._files.root

    @property
    def max_bytes(self) -> int:
        """Most bytes of one adapter."""
        return self._files.max_bytes

    def draft(self) -> Draft:
        """Files to write; see `ContentStore.draft`."""
        return self._files.draft()

    def restore(self, worker: Backend) -> None:
        """Register what the names meant. An adapter with other files by now is left out, and the log names it."""
        if self._names is None:
            return
        book = worker.adapters
        book.count_from(self._names.generation + 1).result()
        by_name: dict[str, list[Entry]] = {}
        for entry in self._names.entries():
            plain, own = split_version(entry.name)
            is_kept = own and own == entry.version
            by_name.setdefault(plain if is_kept else entry.name, []).append(entry)
        for name, entries in by_name.items():
            entries.sort(key=lambda one: (one.name == name, one.generation))  # the newest version last
            for number, entry in enumerate(entries):
                self._restore(worker, name, entry, keep=number + 1)

    def _restore(self, worker: Backend, name: str, entry: Entry, keep: int) -> None:
        image = HostImage()
        try:
            manifest = with_content(worker.check_adapter(Path(entry.path), (), image))
            if manifest.content_hash != entry.content_hash:
                raise AdapterFormatError(f"{entry.path}: the files have changed since")
            put = worker.adapters.put(name, manifest, image, replace=True, label=entry.label, keep=keep)
            put.result()
            worker.adapters.pause(name, paused=entry.paused).result()
        except (AdapterFormatError, FileExistsError) as error:
            log.warning("adapter %s of an earlier run is not served: %s", entry.name, error)

    def remember(self, book: AdapterBook, name: str) -> None:
        """Write down what a name and its kept versions mean by now, and remove files that are not used any more."""
        if self._names is not None:
            _write(self._names, name, book.versions(name).result())
        self.sweep(book)

    def sweep(self, book: AdapterBook) -> None:
        """Remove the files of versions that no name means and no request holds."""
        grace = SHARED_SECONDS if self._names is None else 0

        def used(found: list[Path]) -> set[Path]:
            used, now = book.paths_in_use().result(), self._clock()
            self._unused = {path: self._unused.get(path, now) for path in found if path not in used}
            return used.union(path for path, since in self._unused.items() if now - since < grace)

        self._files.remove_unused(used)

    def close(self) -> None:
        if self._names is not None:
            self._names.close()


def _write(names: RegistryStore, name: str, versions: Sequence[AdapterState]) -> None:
    """Have `names` hold these versions of an adapter, the newest first, and no others."""
    newest_first = [one for one in versions if one.manifest.content_hash is not None]
    now = {one.name for one in newest_first}
    for entry in map(_entry, [*newest_first[1:], *newest_first[:1]]):
        before = names.get(entry.name)
        if before is None or before._replace(generation=0) != entry._replace(generation=0):
            names.put(entry)
    for entry in names.entries():
        if entry.name not in now and name in (entry.name, split_version(entry.name)[0]):
            names.remove(entry.name)


def _entry(state: AdapterState) -> Entry:
    manifest = state.manifest
    return Entry(
        state.name, manifest.content_hash or "", str(manifest.path.absolute()), state.version, manifest.rank,
        manifest.file_size, state.pinned, state.label, state.paused,
    )  # fmt: skip
