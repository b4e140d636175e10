"""Loading adapters into a running engine: the one way in, from HTTP and from the library."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..core.quarantine import report
from ..core.requests.sampling_params import InvalidRequest
from ..memory.files.error import AdapterFormatError
from ..memory.files.identity import open_unchanged
from ..memory.host.image import HostImage
from ..memory.host.limited_threads import LimitedThreads, NoAnswer
from .adapter_keeper import AdapterKeeper
from .executors import DaemonPool
from .worker import EngineWorker

if TYPE_CHECKING:
    from ..core.engine import Engine
    from ..memory.adapters.adapter import Adapter
    from ..memory.files.format import AdapterManifest

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LOAD_THREADS = 8
"""Loads that may be stuck, each on a thread of its own, before further ones are refused."""

MAX_LOADS = 64
"""Loads that may be asked for at once; they are checked one after another."""


class LoadTimedOut(TimeoutError):
    """The disk took longer over an adapter than a load may."""


class AdapterLoads:
    """Adapters are read and checked beside the engine, one at a time; between two steps they are only swapped.

    seconds: how long a disk may take over one; then the load fails, and its thread is left behind. What was loaded is
    looked after from `start` to `stop`: see `AdapterKeeper`.
    """

    def __init__(self, worker: EngineWorker, seconds: float) -> None:
        self._worker = worker
        self._seconds = seconds
        self._turns = DaemonPool("loads", threads=1, max_waiting=MAX_LOADS - 1)
        self._threads = LimitedThreads("adapter-load", MAX_LOAD_THREADS)
        self._keeper = AdapterKeeper(worker, seconds)

    def start(self) -> None:
        self._keeper.start()

    def stop(self) -> None:
        """Begin nothing more; waits for nothing."""
        self._keeper.stop()
        self._turns.shutdown()

    def load(
        self, name: str, find: Callable[[], Path], roots: Sequence[Path] = (), *, replace: bool = True
    ) -> Future[tuple[Adapter, bool]]:
        """Load the directory that `find` gives; the adapter once requests may use it, and if it took another's place.

        find: asks the disk, so it runs beside the engine, too. roots: directories below which its files must lie; none:
        anywhere. Raises PoolFull. The future's errors: what `find` raises, AdapterFormatError, FileExistsError for a
        name that it may not `replace`, LoadTimedOut, and NoThreadLeft when too many loads hang.
        """
        return self._turns.submit(self._load, name, find, roots, replace)

    def _load(self, name: str, find: Callable[[], Path], roots: Sequence[Path], replace: bool) -> tuple[Adapter, bool]:
        directory = self._beside(find)
        if not replace and self._worker.call(lambda engine: name in engine.store).result():
            raise FileExistsError(name)
        manifest, image = self._beside(partial(self._check, directory, roots))
        adapter, replaced = self._worker.call(partial(_swap, name, manifest, image, replace)).result()
        log.info(
            "%s adapter %s: version %d from %s", "replaced" if replaced else "added", name, adapter.version, directory
        )
        report(name, manifest)
        return adapter, replaced

    def _check(self, directory: Path, roots: Sequence[Path]) -> tuple[AdapterManifest, HostImage]:
        """The adapter that is to be swapped in, as it is on the disk at the end of the check, and its weights."""
        image = HostImage()
        manifest = self._worker.check_adapter(directory, roots, image)
        with open_unchanged(manifest):
            return manifest, image

    def _beside(self, function: Callable[[], T]) -> T:
        """The result of what asks the disk, on a thread of its own."""
        try:
            return self._threads.run(function, self._seconds)
        except NoAnswer:
            raise LoadTimedOut(
                f"the disk did not answer within {self._seconds:g} seconds (adapter_load_seconds)"
            ) from None


def _swap(
    name: str, manifest: AdapterManifest, image: HostImage, replace: bool, engine: Engine
) -> tuple[Adapter, bool]:
    """Register what was checked, on the engine's thread, with its weights. FileExistsError unless it may replace."""
    replaced = name in engine.store
    if replaced and not replace:
        raise FileExistsError(name)
    was_pinned = replaced and engine.store.is_pinned(engine.store.get(name))
    adapter = engine.store.register(name, manifest, image)
    if was_pinned:
        _pin_again(name, engine)
    engine.quarantine.pop(name, None)
    return adapter, replaced


def _pin_again(name: str, engine: Engine) -> None:
    """Pin the new version of a pinned adapter, where there is room beside the old one that may still run."""
    try:
        pinned, reason = engine.pin_adapter(name), "it is still being read"
    except (InvalidRequest, AdapterFormatError) as error:
        pinned, reason = False, str(error)
    if not pinned:
        log.warning("adapter %s was pinned, its new version is not: %s", name, reason)
