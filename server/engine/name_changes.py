"""Changes of adapters' names: recorded first, then made, and undone if they can't be made.

Tests: tests/server/api/adapters/test_adapter_versions.py
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ...memory.adapters.publishing import Load, plan_load, plan_removal
from ...memory.adapters.registry_store import Changes, Done, Entry, RegistryError, RegistryStore
from ...memory.adapters.store import UnknownAdapter
from ...memory.adapters.versions import versioned
from ...memory.files.error import AdapterFormatError
from ...memory.files.identity import with_content
from ...memory.host.daemon_pool import DaemonPool, PoolFull
from ..errors import ApiError

if TYPE_CHECKING:
    from ...memory.files.manifest import AdapterManifest
    from ...memory.host.image import HostImage
    from .backend_adapters import BackendAdapters
    from .engine_view import AdapterState

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CHANGES = 64
"""Changes that may wait for the file of names."""


class StorageUnavailable(ApiError):
    """A change can't be recorded, so it is not made."""

    def __init__(self, reason: str) -> None:
        message = f"the change can't be recorded, so it was not made: {reason}; try again later"
        super().__init__(503, message, code="storage_unavailable", retry_after=1)


class Removed(NamedTuple):
    """A version that was removed, and the requests that were cancelled for it."""

    label: str
    content_hash: str | None
    ended: int


class NameChanges:
    """Makes all changes of names, for any thread, one at a time. Each call may wait for the disk."""

    def __init__(
        self,
        adapters: BackendAdapters,
        names: RegistryStore | None,
        seconds: float,
        on_retired: Callable[[list[Entry]], None] = lambda _: None,
    ) -> None:
        """names: the file; None if a cluster's registry records changes. seconds: that its disk may take. on_retired:
        called with entries that lost their names.
        """
        self._adapters = adapters
        self._names = names
        self._seconds = seconds
        self._on_retired = on_retired
        self._changing = threading.Lock()
        self._disk = DaemonPool("names", threads=1, max_waiting=MAX_CHANGES)

    def close(self) -> None:
        """Accept no more changes; waits for nothing."""
        self._disk.shutdown()

    def load(
        self,
        name: str,
        manifest: AdapterManifest,
        image: HostImage,
        *,
        replace: bool,
        label: str | None,
        keep: int | None,
    ) -> tuple[AdapterState, bool]:
        """Make a checked adapter the newest version of a name; returns its state, and whether the name existed before.

        label: the version; None: the name's next number. keep: as in `plan_load`. Registering the same content under an
        existing version changes nothing. Raises FileExistsError for a name that it may not `replace`, LabelTaken,
        StorageUnavailable, RegistryFull.
        """
        adapters = self._adapters
        own = versioned(name, label) if label and keep is None else name
        if self._names is None:
            return adapters.put(own, manifest, image, replace=replace, label=label, keep=keep).result()
        with self._alone() as names:
            served = adapters.versions(name).result()
            entry = Entry.of(own, manifest, label or "")
            there = names.find(versioned(name, label)) if label else None
            if there is not None and not any(one.label == label for one in served):  # it could not be restored
                self._write(lambda: names.change(plan_removal(names, versioned(name, there.label))))
            before = self._unwritten(names, name, served, keep)
            number = adapters.newest_number(name).result()

            def write() -> tuple[Load, Done]:
                can = replace or not served
                plan = plan_load(names, entry, replace=can, keep=keep, before=before, last_number=number)
                return plan, names.change(plan.changes)

            plan, done = self._write(write, lambda result: result[1])
            if not plan.changes:
                return _newest_or(adapters, name, plan.entry.label), True
            with self._undone(done):
                put = adapters.put(own, manifest, image, replace=True, label=plan.entry.label, keep=keep)
                state, existed = put.result()
            self._on_retired(done.retired)
            return state, existed

    def remove(self, name: str, *, force: bool) -> Removed:
        """Forget an adapter with its kept versions, or one version. Raises UnknownAdapter, StorageUnavailable."""
        if self._names is None:
            state, ended = self._adapters.remove(name, force=force).result()
            return Removed(state.label, state.manifest.content_hash, ended)
        with self._alone() as names:
            entry = names.find(name)
            if entry is None:
                self._adapters.state(name).result()
            changes = [] if entry is None else plan_removal(names, name)
            done = self._write(lambda: names.change(changes), lambda result: result)
            with self._undone(done):
                try:
                    state, ended = self._adapters.remove(name, force=force).result()
                    removed = Removed(state.label, state.manifest.content_hash, ended)
                except UnknownAdapter:
                    if entry is None:
                        raise
                    removed = Removed(entry.label, entry.content_hash, 0)  # it could not be restored
            self._on_retired(done.retired)
            return removed

    def pause(self, name: str, *, paused: bool) -> None:
        """Refuse or accept new requests for all versions of a name. Raises UnknownAdapter, StorageUnavailable."""
        if self._names is None:
            self._adapters.pause(name, paused=paused).result()
            return
        with self._alone() as names:
            self._adapters.state(name).result()
            served = self._adapters.versions(name).result()
            try:
                entries = [
                    names.get(one.name) or Entry.of(one.name, with_content(one.manifest), one.label)
                    for one in ([one for one in served if one.name == name] or served)  # else it has only labels
                ]
            except AdapterFormatError as error:  # after a restart it is not served, either
                log.warning("adapter %s: whether it is paused could not be recorded for a restart: %s", name, error)
                self._adapters.pause(name, paused=paused).result()
                return
            changes: Changes = [(one.name, one._replace(paused=paused)) for one in entries]
            done = self._write(lambda: names.change(changes), lambda result: result)
            with self._undone(done):
                self._adapters.pause(name, paused=paused).result()

    def _unwritten(self, names: RegistryStore, name: str, served: list[AdapterState], keep: int | None) -> Entry | None:
        """The newest version of a name that the file does not have: one registered at startup."""
        newest = next((one for one in served if one.name == name), None)
        if newest is None or names.get(name) is not None:
            return None
        manifest = newest.manifest if keep == 1 else with_content(newest.manifest)
        return Entry.of(name, manifest, newest.label, paused=newest.paused)

    @contextmanager
    def _alone(self) -> Iterator[RegistryStore]:
        if not self._changing.acquire(timeout=2 * self._seconds):
            raise StorageUnavailable("another change takes too long")
        try:
            assert self._names is not None
            yield self._names
        finally:
            self._changing.release()

    @contextmanager
    def _undone(self, done: Done) -> Iterator[None]:
        """Undo a change that was recorded and can't be made."""
        try:
            yield
        except BaseException:
            try:
                self._write(lambda: self._revert(done))
            except StorageUnavailable as error:
                log.error("adapter %s differs from the file of names: %s", [name for name, _ in done.told], error)
            raise

    def _write(self, change: Callable[[], T], done_of: Callable[[T], Done] | None = None) -> T:
        """The result of a function that writes names. Raises StorageUnavailable: nothing was written, or it is undone
        once the disk responds.
        """
        try:
            future = self._disk.submit(change)
        except PoolFull as error:
            raise StorageUnavailable(str(error)) from None
        try:
            return future.result(self._seconds)
        except RegistryError as error:
            raise StorageUnavailable(str(error)) from None
        except TimeoutError:
            if future.done():
                raise
            if not future.cancel() and done_of is not None:
                future.add_done_callback(lambda late: self._undo_late(late, done_of))
            reason = f"the disk did not answer within {self._seconds:g} seconds (adapter_load_seconds)"
            raise StorageUnavailable(reason) from None

    def _undo_late(self, late: Future[T], done_of: Callable[[T], Done]) -> None:
        """On the thread that writes, before anything else is written."""
        if late.exception() is None:
            done = done_of(late.result())
            try:
                self._revert(done)
            except RegistryError as error:
                log.error("adapter %s differs from the file of names: %s", [name for name, _ in done.told], error)

    def _revert(self, done: Done) -> None:
        assert self._names is not None
        self._names.change(done.before, retires=False)


def _newest_or(adapters: BackendAdapters, name: str, label: str) -> AdapterState:
    """The state of a version: under the name itself if it is the newest."""
    newest = adapters.state(name).result()
    return newest if newest.label == label else adapters.state(versioned(name, label)).result()
