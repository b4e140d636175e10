"""Background care of adapters: reads and hashes weights, and retries broken adapters.

Tests: tests/server/engine/test_adapter_health.py, tests/server/api/adapters/test_adapter_limits.py
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...core.quarantine import Quarantined, Stamp, is_as_registered, report, report_contents, stamp_of
from ...memory.files.error import AdapterFormatError
from ...memory.files.identity import with_content
from ...memory.host.daemon_pool import DaemonPool, NoAnswer, PoolFull, ask_for_short_slices, stand_back
from ...memory.host.image import HostImage
from ..errors import EngineUnavailable
from ..executors import Repeating
from .backend import Backend
from .engine_adapters import MOST_OVERFLOWS
from .engine_view import AdapterState

if TYPE_CHECKING:
    from ...memory.files.manifest import AdapterManifest

log = logging.getLogger(__name__)
audit = logging.getLogger("chorus.audit")

T = TypeVar("T")

TURN_SECONDS = 2.0
"""Seconds between checks of quarantined directories; one is retried once it has not changed for as long."""

HASH_SHARE = 1 / 8
"""Largest share of the time spent reading adapters for their hashes."""


MAX_STUCK = 4
"""Checks, and hashes, that may hang before further ones are skipped."""

BATCH = 64
"""Quarantined directories that one thread checks; if one hangs, the rest of the batch waits with it."""


class AdapterHealthChecker(Repeating):
    """Looks after adapters in the background, from `start` to `stop`, which waits for nothing.

    Disk reads run on separate threads, and are abandoned after `seconds`.

    places: directories that must contain the files of an adapter that is retried.
    """

    def __init__(
        self,
        worker: Backend,
        seconds: float,
        places: Sequence[Path] = (),
        sweep: Callable[[], None] | None = None,
    ) -> None:
        """sweep: removes files that are no longer used."""
        super().__init__("adapter-health", TURN_SECONDS)
        self._worker = worker
        self._sweep = sweep
        self._adapters = worker.adapters
        self._places = tuple(place.resolve() for place in places)
        self._look_seconds = seconds
        self._threads = DaemonPool("adapter-health", MAX_STUCK, 0, initializer=ask_for_short_slices)
        self._hashers = DaemonPool("adapter-hash", MAX_STUCK, 0, initializer=_stand_back)
        self._stamps: dict[str, Stamp] = {}  # states of quarantined directories at the latest turn
        self._hopeless: set[int] = set()  # versions that could not be hashed

    def _run(self) -> None:
        with self._threads, self._hashers:
            super()._run()

    def _turn(self) -> None:
        if self._stopping.is_set():
            return
        try:
            self._try_again()
            self._set_aside_overflowing()
            self._hash_some()
            if self._sweep is not None:
                self._beside(self._sweep)
        except EngineUnavailable as error:
            log.debug("checks of adapters are postponed: %s", error)  # a stall ends, or the server does
            if self._worker.failure is not None:
                self._stopping.set()
        except Exception as error:
            if not self._stopping.is_set():
                raise
            log.debug("a check of adapters ended with the server: %r", error)  # its event loop has stopped

    # -- quarantine

    def _try_again(self) -> None:
        quarantined = [one for one in self._adapters.quarantined().result() if one.can_retry]
        for first in range(0, len(quarantined), BATCH):
            batch = quarantined[first : first + BATCH]
            stamps = self._beside(partial(_stamps_of, batch))
            for one, stamp in zip(batch, stamps or (), strict=False):
                if self._stopping.is_set():
                    return
                # otherwise unchanged, or still being written
                if stamp != one.stamp and stamp == self._stamps.get(one.name):
                    self._try(one, stamp)
                self._stamps[one.name] = stamp

    def _try(self, one: Quarantined, stamp: Stamp) -> None:
        try:
            image = HostImage()
            manifest = self._beside(lambda: self._worker.check_adapter(one.path, self._places, image))
            is_served = manifest is not None and self._adapters.release(one.name, manifest, image).result()
        except AdapterFormatError as error:
            log.warning("adapter %s changed, but is not served: %s", one.name, error)
            again = replace(one, reason=str(error), stamp=stamp)
            self._adapters.keep_aside(again).result()
            return
        if manifest is not None and is_served:
            audit.info("adapter %s has changed and is served now: content %s", one.name, manifest.content_hash)
            report(one.name, manifest)

    # -- weights

    def _hash_some(self) -> None:
        """Spend a share of the time until the next turn on hashing."""
        began = time.monotonic()
        for one in self._unhashed():
            name, version, manifest = one.name, one.version, one.manifest
            if self._stopping.is_set() or time.monotonic() - began > TURN_SECONDS:
                return
            start = time.monotonic()
            try:
                known = self._beside(partial(self._look, manifest), self._hashers)
            except AdapterFormatError as error:
                self._give_up(name, version, manifest, error)
            else:
                if known is None:
                    self._hopeless.add(version)
                elif self._adapters.note(name, version, known).result() and known.no_effect and not manifest.no_effect:
                    report_contents(name, known)
            self._stopping.wait((time.monotonic() - start) * (1 / HASH_SHARE - 1))

    def _look(self, manifest: AdapterManifest) -> AdapterManifest:
        """Check the weights, unless a load did, and hash them."""
        if manifest.no_effect is None:
            manifest = self._worker.check_weights(manifest)
        return with_content(manifest)

    def _give_up(self, name: str, version: int, manifest: AdapterManifest, error: AdapterFormatError) -> None:
        """Quarantine an adapter with broken weights that was registered at startup; never hash another one again.

        An adapter loaded over HTTP was checked then, so its files have changed since; after a disk error its weights
        may still be intact.
        """
        log.warning("adapter %s can't be read: %s", name, error)
        is_broken = manifest.no_effect is None and not isinstance(error.__cause__, OSError)
        if (
            not is_broken
            or self._adapters.set_aside(self._quarantined(name, manifest, str(error)), version, in_use=False).result()
        ):
            self._hopeless.add(version)

    def _quarantined(self, name: str, manifest: AdapterManifest, reason: str) -> Quarantined:
        stamp = self._beside(partial(stamp_of, manifest.path))
        if stamp is not None and not is_as_registered(stamp, manifest):
            stamp = None  # retry with the files that are there now
        return Quarantined(name, manifest.path, reason, stamp)

    def _set_aside_overflowing(self) -> None:
        """Quarantine adapters with finite weights and non-finite logits."""
        reason = f"its logits were not finite in its first {MOST_OVERFLOWS} requests; train it again, or scale it down"
        for one in self._adapters.overflowing().result():
            aside = self._quarantined(one.name, one.manifest, reason)
            self._adapters.set_aside(aside, one.version, in_use=True).result()

    def _unhashed(self) -> list[AdapterState]:
        """Return the versions to hash, resident adapters first: KV events of their blocks wait for the hash."""
        states = [one for one in self._adapters.unhashed().result() if one.version not in self._hopeless]
        return sorted(states, key=lambda one: not one.pages)

    # -- common

    def _beside(self, function: Callable[[], T], threads: DaemonPool | None = None) -> T | None:
        """The result; None if it takes too long."""
        try:
            return (threads or self._threads).wait_for(function, self._look_seconds)
        except (NoAnswer, PoolFull) as error:
            log.warning("adapters can't be read: %s", error)
            return None


_LOWEST = 40
"""More steps than priorities have."""


def _stand_back() -> None:
    """Run the thread at the lowest priority."""
    ask_for_short_slices()
    stand_back(_LOWEST)


def _stamps_of(quarantined: list[Quarantined]) -> list[Stamp]:
    return [stamp_of(one.path) for one in quarantined]
