"""Content hashes of adapters that requests need before their weights have been looked at.

Tests: tests/memory/disk/test_adapter_contents.py, tests/core/test_prefix_tiers.py
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

from ..adapters.adapter import Adapter
from ..adapters.store import AdapterStore
from ..files.config import CONFIG_FILE
from ..files.identity import with_content
from ..files.manifest import AdapterManifest
from ..host.daemon_pool import DaemonPool
from .remembered import RememberedHashes
from .writer import Pool

logger = logging.getLogger(__name__)

Found = list[tuple[Adapter, str]]


class AdapterContents:
    """Finds out the content hash of each version that a request asks for, once, on a thread: from what was remembered
    of its unchanged files, or else from its weights. A hash that is known already is remembered.
    """

    def __init__(
        self, store: AdapterStore, remembered: RememberedHashes, identity: bytes, wake: Callable[[], None]
    ) -> None:
        """identity: of the server's KV: another base model may read the same files as another adapter. wake: called
        when a hash was found, from the thread.
        """
        self._store, self._remembered, self._wake = store, remembered, wake
        self._identity = identity.hex()
        self.pool: Pool = DaemonPool("kv-hash", 1, 1024)
        self._asked = WeakSet[Adapter]()
        self._under_way: dict[int, Future[Found]] = {}

    def learn(self, version: int) -> Future[Found] | None:
        """Begin to find out a version's content hash, and remember it; returns what does until `advance` has noted it.
        None for the base model, for what is known, and for what can't be read.
        """
        if (future := self._under_way.get(version)) is not None:
            return future
        adapter = self._store.find_version(version)
        if adapter is None or adapter in self._asked:
            return None
        try:
            future = self.pool.submit(self._find, [(one, one.manifest) for one in adapter.sources or (adapter,)])
        except Exception as error:  # too many wait, or there is no thread: the next request asks again
            logger.debug("the content hash of %r is not looked for: %s", adapter.name, error)
            return None
        self._asked.add(adapter)
        self._under_way[version] = future
        return future

    @property
    def is_busy(self) -> bool:
        """True until `advance` has noted what is being found."""
        return bool(self._under_way)

    def advance(self) -> None:
        """Note the hashes that were found; called on the engine's thread."""
        for version, future in [each for each in self._under_way.items() if each[1].done()]:
            del self._under_way[version]
            for adapter, content in future.result():
                manifest = adapter.manifest
                if manifest.content_hash is None and self._store.find_version(adapter.version) is adapter:
                    # whether it has an effect, and its weights are sound, is still to be checked
                    self._store.note(adapter, replace(manifest, content_hash=content))

    def close(self) -> None:
        self.pool.shutdown()

    def _find(self, adapters: list[tuple[Adapter, AdapterManifest]]) -> Found:
        """The hashes that can be found; runs on the thread."""
        found: Found = []
        for adapter, manifest in adapters:
            try:
                content = self._content(manifest)
            except Exception as error:  # whoever loads it is told
                logger.debug("the content hash of %r is not known: %s", adapter.name, error)
            else:
                found.append((adapter, content))
        self._wake()
        return found

    def _content(self, manifest: AdapterManifest) -> str:
        mark, content = self._mark(manifest), manifest.content_hash
        if content is None and mark is not None:
            content = self._remembered.recall(mark)
        if content is None:
            content = with_content(manifest).content_hash
            assert content is not None
        if mark is not None:
            self._remembered.remember(mark, content)
        return content

    def _mark(self, manifest: AdapterManifest) -> str | None:
        """All that a content hash follows from: how the adapter's configuration was read, and the states of its weights
        file and of its configuration, which change when the files do: formulas have numbers of the latter that nothing
        else tells. None where that was not looked at.
        """
        one = manifest
        if one.identity is None:
            return None
        state = str(one.path), one.file_size, one.mtime_ns, tuple(one.identity), _state_of(one.path / CONFIG_FILE)
        tokens = None if one.tokens is None else one.tokens.digest
        read = (
            one.parts,
            one.vectors,
            one.invocation_tokens,
            one.tower,
            one.head is not None,
            one.stem,
            tokens,
            one.form,
        )
        return repr((self._identity, state, read))


def _state_of(path: Path) -> tuple[int, ...]:
    """What changes when a file does; empty where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
