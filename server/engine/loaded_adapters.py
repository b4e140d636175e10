"""Adapters loaded over HTTP, across restarts: uploaded files, and the table of names.

Tests: tests/server/api/adapters/test_uploads_kept.py, tests/server/api/adapters/test_back_up.py
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...memory.adapters.registry_store import Entry, RegistryStore
from ...memory.adapters.store import UnknownAdapter
from ...memory.files.error import AdapterFormatError
from ...memory.files.form import WEIGHTS_FILE
from ...memory.files.identity import with_content
from ...memory.files.uploads.content_store import StagedUpload
from ...memory.files.uploads.owned_store import OwnedStore, Owner
from ...memory.host.image import HostImage

if TYPE_CHECKING:
    from ..settings import Settings
    from .backend import Backend
    from .backend_adapters import BackendAdapters, RegistryNames

log = logging.getLogger(__name__)

NAMES_FILE = "names.sqlite"

SHARED_SECONDS = 60.0
"""Seconds for which a directory is kept after its version was retired, if other API servers may use it: their requests
may not have reached a replica yet.
"""


class LoadedAdapters:
    """A directory of adapters' files, with a file of names in it; for any thread.

    A cluster's registry keeps the names of its adapters: then `names` is None, and other API servers use the files,
    too.
    """

    def __init__(self, files: OwnedStore, names: RegistryStore | None) -> None:
        self._files = files
        self.names = names

    @classmethod
    def of(cls, settings: Settings, adapters: BackendAdapters) -> LoadedAdapters | None:
        """None without a directory. Raises OSError, RegistryError or OtherOwner if it can't be used."""
        if (root := settings.adapter_uploads) is None:
            return None
        root.mkdir(parents=True, exist_ok=True)
        registry = adapters.registry().result()
        names = None if registry is not None else RegistryStore(root / NAMES_FILE)
        try:
            files = _files(settings, root, registry, names)
        except BaseException:
            if names is not None:
                names.close()
            raise
        return cls(files, names)

    @property
    def root(self) -> Path:
        return self._files.root

    @property
    def max_bytes(self) -> int:
        """Most bytes of one adapter."""
        return self._files.max_bytes

    def draft(self, expected: int) -> StagedUpload:
        """Files to write, of which the weights are hashed when they are checked; see `ContentStore.draft`."""
        return self._files.draft(expected, known_later=(WEIGHTS_FILE,))

    def restore(self, worker: Backend) -> None:
        """Register the recorded names, and pause those that were paused. An adapter whose files have changed is
        skipped, and the log names it.
        """
        if self.names is None:
            return
        by_name: dict[str, list[Entry]] = {}
        for entry in self.names.entries():
            by_name.setdefault(entry.plain_name, []).append(entry)
        for name, entries in by_name.items():
            entries.sort(key=lambda one: (one.name == name, one.generation))  # the newest version last
            for entry in entries:
                self._restore(worker, name, entry)
            with suppress(UnknownAdapter):  # nothing under this name is served
                worker.adapters.pause(name, paused=any(one.paused for one in entries)).result()

    def _restore(self, worker: Backend, name: str, entry: Entry) -> None:
        """Register a recorded version, unless a version of `--adapters` has its label."""
        image = HostImage()
        try:
            served = worker.adapters.versions(name).result()
            same = next((one for one in served if one.label == entry.label), None)
            if same is not None:
                if with_content(same.manifest).content_hash == entry.content_hash:
                    return
                raise AdapterFormatError(
                    f"{same.manifest.path} is served as version {entry.label} of {name} since the start, and holds "
                    "another adapter"
                )
            manifest = worker.check_adapter(self._files.find(Path(entry.path)), (), image)
            if manifest.content_hash != entry.content_hash:
                raise AdapterFormatError(f"{entry.path}: the files have changed since")
            put = worker.adapters.put(entry.name, manifest, image, replace=True, label=entry.label, keep=None)
            state, _ = put.result()
            worker.adapters.loaded_names.add(name, state.label)
        except AdapterFormatError as error:
            log.warning(
                "adapter %s of an earlier run is not served; its files stay until it is removed or replaced: %s",
                entry.name,
                error,
            )

    def retire(self, entries: Iterable[Entry]) -> None:
        """Remove the files of versions that lost their names, unless another name means them."""
        self._files.retire(Path(entry.path) for entry in entries)

    def sweep(self, adapters: BackendAdapters) -> None:
        """Remove the files of retired versions that no name means and no request uses, and set orphans aside."""
        registry = adapters.registry().result()
        if registry is not None and registry.identity != self._files.owner:
            log.error(
                "%s belongs to another set of names than the registry has now, so nothing is removed there; "
                "restore the registry's file",
                self.root,
            )
            return
        if registry is not None:
            self.retire(registry.retired)

        def named() -> set[str]:
            return {Path(entry.path).name for entry in self._entries(adapters)}

        def used() -> set[str]:
            return {path.name for path in adapters.paths_in_use().result()}

        self._files.sweep(named, used)

    def _entries(self, adapters: BackendAdapters) -> Collection[Entry]:
        """What the names mean now."""
        if self.names is not None:
            return self.names.entries()
        registry = adapters.registry().result()
        assert registry is not None  # it has kept the names since the start
        return registry.entries

    def close(self) -> None:
        if self.names is not None:
            self.names.close()
        self._files.close()


def _files(settings: Settings, root: Path, registry: RegistryNames | None, names: RegistryStore | None) -> OwnedStore:
    if registry is not None:
        owner, grace_seconds = Owner(registry.identity, is_shared=True), SHARED_SECONDS
    else:
        assert names is not None
        owner, grace_seconds = Owner(names.identity, takes_over=names.is_new), 0.0
    sizes = settings.max_adapter_bytes, settings.max_uploaded_bytes
    files = OwnedStore(root, *sizes, owner, grace_seconds=grace_seconds)
    if names is not None and names.is_new and (found := len(files.directories())):
        log.warning(
            "%s is new, but its directory holds %d adapters: their names are lost, so they are kept but not served; "
            "restore the file from a backup and start again, or load them again",
            root / NAMES_FILE,
            found,
        )
    return files
