"""Loads adapters into a running engine, for HTTP and for the library.

Tests: tests/server/api/adapters/test_adapter_limits.py
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.quarantine import report
from ...memory.adapters.registry_store import Entry, RegistryStore
from ...memory.adapters.versions import split_version
from ...memory.files.error import shown
from ...memory.files.identity import open_unchanged
from ...memory.host.daemon_pool import DaemonPool, PoolFull, ask_for_short_slices, give_up, stand_back
from ...memory.host.image import HostImage
from ...memory.host.reads import SLOW_SECONDS
from ..errors import ApiError
from .adapter_health import AdapterHealthChecker
from .backend import Backend
from .engine_view import AdapterState
from .load_source import LoadSource
from .name_changes import NameChanges, Removed

if TYPE_CHECKING:
    from ...memory.files.manifest import AdapterManifest
    from ...memory.files.uploads.content_store import StagedUpload
    from .adapter_tokenizers import AdapterTokenizers
    from .loaded_adapters import LoadedAdapters

log = logging.getLogger(__name__)
audit = logging.getLogger("chorus.audit")

T = TypeVar("T")

MAX_LOAD_THREADS = 8
"""Loads that may be stuck, each on its own thread, before further ones are refused."""

MAX_LOADS = 64
"""Loads that may be requested at once."""

COPY_STEPS = 5
"""Steps of priority by which a copy of an upload's file stands back: the load that reads it meanwhile takes longer."""


CLOSE_SECONDS = 1.0

HERE = "this process"
"""Name in the log for changes that no client requested."""


class NotAlone(ApiError):
    """Other API servers serve the same clients, and would go on with the base model."""

    def __init__(self, field: str) -> None:
        message = (
            f"{field}: an adapter can serve the base model's name only if there is one API server and no registry of "
            "adapters; start with --api-servers 1, or have clients name the adapter"
        )
        super().__init__(400, message, param=field, code="unsupported_parameter")


def check_alone(worker: Backend, field: str) -> None:
    """Raise NotAlone unless this process alone resolves the names of models. field: that needs it."""
    if worker.shared is not None or worker.adapters.registry().result() is not None:
        raise NotAlone(field)


class LoadTimedOut(TimeoutError):
    """Reading an adapter took longer than a load may."""


class AdapterLoader:
    """Loads adapters: reads and checks them in the background, one at a time, and swaps them in between two steps.

    If a disk takes longer, other loads go on, but loads under one name follow each other. What was loaded is looked
    after from `start` to `stop`: see `AdapterHealthChecker`.

    seconds: time limit of a disk per adapter; after it the load fails, and its thread is abandoned. places: directories
    in which a broken adapter may be fixed. loaded: remembers loads, and owns uploaded files. tokenizers: warns about
    adapters with their own chat template.
    """

    def __init__(
        self,
        worker: Backend,
        seconds: float,
        places: Sequence[Path] = (),
        loaded: LoadedAdapters | None = None,
        tokenizers: AdapterTokenizers | None = None,
    ) -> None:
        self._worker = worker
        self._seconds = seconds
        self._pool = DaemonPool("loads", threads=MAX_LOAD_THREADS, max_waiting=MAX_LOADS - MAX_LOAD_THREADS)
        self._threads = DaemonPool("adapter-load", MAX_LOAD_THREADS, 0, initializer=ask_for_short_slices)
        self._reading = threading.Lock()
        self._asking = threading.Lock()
        self._latest: dict[str, Future] = {}
        self.loaded = loaded
        self._tokenizers = tokenizers
        self._uploads = DaemonPool("uploads", threads=MAX_LOAD_THREADS, max_waiting=MAX_LOADS)
        copy = partial(stand_back, COPY_STEPS)
        self._copies = DaemonPool("upload-copies", MAX_LOAD_THREADS, MAX_LOADS, initializer=copy)
        self._ends = DaemonPool("upload-ends", threads=MAX_LOAD_THREADS, max_waiting=math.inf)
        self._changes = DaemonPool("adapter-changes", threads=MAX_LOAD_THREADS, max_waiting=MAX_LOADS)
        self._names = NameChanges(worker.adapters, self._names_file(), seconds, self._retired)
        sweep = None if loaded is None else partial(loaded.sweep, worker.adapters)
        self._health_checker = AdapterHealthChecker(worker, seconds, places, sweep)

    def start(self) -> None:
        """Restore the adapters loaded before a restart, and begin to look after adapters."""
        if self.loaded is not None:
            self.loaded.restore(self._worker)
        self._health_checker.start()
        if self._tokenizers is not None:
            self._pool.submit(self._tokenizers.note_all)

    def stop(self) -> None:
        """Begin nothing more; waits only a moment, for files to be closed."""
        self._health_checker.stop()
        for pool in (self._pool, self._threads, self._uploads, self._copies, self._ends, self._changes):
            pool.shutdown()
        self._names.close()
        if self.loaded is not None:
            closing = DaemonPool("uploads-close", threads=1)
            wait([closing.submit(self.loaded.close)], CLOSE_SECONDS)  # a hanging disk must not keep the process alive
            closing.shutdown()

    async def beside(self, function: Callable[..., T], /, *arguments: Any) -> T:
        """Run a slow call on a thread. Raises PoolFull."""
        return await self._pool.run(function, *arguments)

    def on_uploads(self, function: Callable[..., T], /, *arguments: Any) -> Future[T]:
        """Run a call that accesses the disk of uploads; it does not wait for other disks. Raises PoolFull."""
        return self._uploads.submit(function, *arguments)

    def beside_load(self, copy: Callable[[], None]) -> Future[None]:
        """Copy an upload's file at a lower priority than the load that reads it meanwhile. Raises PoolFull."""
        return self._copies.submit(copy)

    def end_draft(self, draft: StagedUpload, *, failed: bool) -> Future[None]:
        """End a staged upload on a thread; see `StagedUpload.end`."""
        return self._ends.submit(partial(draft.end, failed=failed))

    @property
    def seconds(self) -> float:
        """Seconds that a disk may take over one adapter."""
        return self._seconds

    async def remove(self, name: str, *, force: bool) -> Removed:
        """Remove an adapter, or a version of one. Raises UnknownAdapter, StorageUnavailable, PoolFull."""
        return await self._changes.run(partial(self.remove_now, name, force=force))

    def remove_now(self, name: str, *, force: bool) -> Removed:
        """The same, possibly waiting for the disk."""
        removed = self._names.remove(name, force=force)
        base = self._worker.adapters.as_base
        if base is not None and split_version(base)[0] == split_version(name)[0] and not self._is_there(base):
            self.serve_as_base(None)
        self._sweep()
        return removed

    def check_alone(self, field: str) -> None:
        """See the function `check_alone`."""
        check_alone(self._worker, field)

    def serve_as_base(self, name: str | None, by: str = HERE) -> None:
        """Have requests for the base model's name served by an adapter; None: by the base model. by: as in `load`."""
        adapters = self._worker.adapters
        if adapters.as_base != name:
            adapters.as_base = name
            what = "the base model itself" if name is None else f"adapter {name}"
            audit.info("%s has requests for the base model's name served by %s", by, what)

    def loaded_as_base(self, name: str, by: str, as_base: bool, load: Future) -> None:
        """Once a load has succeeded, have the adapter serve the base model's name, or no longer. by: as in `load`."""
        if load.cancelled() or load.exception() is not None:
            return
        if as_base:
            self.serve_as_base(name, by)
        elif name == self._worker.adapters.as_base:
            self.serve_as_base(None, by)

    async def pause(self, name: str, *, paused: bool) -> None:
        """Pause or resume all versions of an adapter. Raises UnknownAdapter, StorageUnavailable, PoolFull."""
        await self._changes.run(partial(self._names.pause, name, paused=paused))

    def _names_file(self) -> RegistryStore | None:
        """The file that records changes: None if a cluster's registry records them; in memory without a directory."""
        if self.loaded is not None:
            return self.loaded.names
        return RegistryStore(Path(":memory:")) if self._worker.adapters.registry().result() is None else None

    def _retired(self, entries: list[Entry]) -> None:
        if self.loaded is not None:
            self.loaded.retire(entries)

    def _sweep(self) -> None:
        """Remove the files of retired versions; if the disk is slow, later."""
        if self.loaded is not None:
            try:
                wait([self._uploads.submit(self.loaded.sweep, self._worker.adapters)], SLOW_SECONDS)
            except PoolFull as error:
                log.warning("unused files stay for now: %s", error)

    def load(
        self,
        name: str,
        source: LoadSource,
        *,
        replace: bool = True,
        by: str = HERE,
        label: str | None = None,
        keep: int | None = 1,
    ) -> Future[tuple[AdapterState, bool]]:
        """Load the adapter of a source. The future gives the adapter once requests may use it, and whether it replaced
        another.

        by: the caller's name in the log. label, keep: as in `plan_load`. Raises PoolFull. Errors of the
        future: those of `source.find`, AdapterFormatError, FileExistsError for a name that it may not `replace` or an
        existing version, LoadTimedOut, PoolFull if too many loads hang, and StorageUnavailable if the change can't be
        recorded, in which case the adapter is not served.
        """
        with self._asking:
            before = self._latest.get(name)
            put = partial(self._put, name, by=by, replace=replace, label=label, keep=keep)
            load = partial(self._load, before, name, source, replace=replace, put=put)
            future = self._latest[name] = self._pool.submit(load)
        future.add_done_callback(partial(self._forget, name))
        return future

    def _forget(self, name: str, load: Future) -> None:
        with self._asking:
            if self._latest.get(name) is load:
                del self._latest[name]

    def _load(
        self,
        before: Future | None,
        name: str,
        source: LoadSource,
        *,
        replace: bool,
        put: Callable[[AdapterManifest, HostImage], tuple[AdapterState, bool]],
    ) -> tuple[AdapterState, bool]:
        if before is not None:
            wait([before])
        directory = self._beside(source.find)
        if not replace and self._is_there(name):
            raise FileExistsError(name)
        return put(*self._beside(partial(self._check, directory, source)))

    def _put(
        self,
        name: str,
        manifest: AdapterManifest,
        image: HostImage,
        *,
        by: str,
        replace: bool,
        label: str | None,
        keep: int | None,
    ) -> tuple[AdapterState, bool]:
        adapter, replaced = self._names.load(name, manifest, image, replace=replace, label=label, keep=keep)
        done = "replaced" if replaced else "added"
        content = f"version {adapter.label}, content {manifest.content_hash}, from {shown(str(manifest.path))}"
        audit.info("%s %s adapter %s: %s", by, done, name, content)
        report(name, manifest)
        if self._tokenizers is not None:
            self._tokenizers.note([adapter])
        self._sweep()
        return adapter, replaced

    def _is_there(self, name: str) -> bool:
        return self._worker.adapters.is_registered(name).result()

    def _check(self, directory: Path, source: LoadSource) -> tuple[AdapterManifest, HostImage]:
        """The adapter to be swapped in, as it is on the disk at the end of the check, and its weights."""
        image = HostImage()
        limits = {"everywhere": source.is_push, "max_bytes": source.max_bytes}
        manifest = self._worker.check_adapter(directory, source.roots, image, source.settle, **limits)
        with open_unchanged(manifest):
            return manifest, image

    def _beside(self, function: Callable[[], T]) -> T:
        """The result of a function that accesses the disk, on its own thread; alone, unless it takes long."""
        with self._reading:
            future = self._threads.submit(function)
            wait([future], min(SLOW_SECONDS, self._seconds))
        try:
            if not wait([future], self._seconds).done:
                give_up(future)
                raise LoadTimedOut(f"its files were not read within {self._seconds:g} seconds (adapter_load_seconds)")
            return future.result()
        finally:
            del future  # the error's frames would refer to it, and it to the error
