"""Loads that have pages but not yet all of their bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ..host.image import HostImage
from ..pages.pool import PageKind, PagePool
from ..transfers.transfer import Transfer
from .adapter import Adapter

logger = logging.getLogger(__name__)


class LoadsInFlight:
    """Adapters whose bytes are on their way into pages, and pages that cancelled ones may still write to."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._loads: dict[Adapter, tuple[HostImage, float]] = {}
        self._leaving: list[tuple[Transfer, list[int]]] = []

    def __bool__(self) -> bool:
        return bool(self._loads or self._leaving)

    def begin(self, adapter: Adapter, transfer: Transfer, image: HostImage, start: float) -> None:
        """start: seconds, on the owner's clock."""
        adapter.transfer = transfer
        self._loads[adapter] = image, start

    def adapters(self) -> list[Adapter]:
        return list(self._loads)

    def image(self, adapter: Adapter) -> HostImage:
        return self._loads[adapter][0]

    def ended(self) -> list[tuple[Adapter, float, BaseException | None]]:
        """Adapters whose transfer is done, or has failed and why; each with its start. They stay until `end`."""
        found: list[tuple[Adapter, float, BaseException | None]] = []
        for adapter, (image, start) in self._loads.items():
            try:
                is_done, has_failed = adapter.transfer.is_done(), adapter.transfer.has_failed()
            except Exception as error:  # a driver that refuses a copy; others' loads go on
                logger.exception("loading %r failed", adapter)
                found.append((adapter, start, error.with_traceback(None)))
                continue
            if is_done:
                found.append((adapter, start, None))
            elif has_failed:
                found.append((adapter, start, image.error or RuntimeError("its bytes did not come")))
        return found

    def end(self, adapter: Adapter) -> None:
        adapter.transfer = None
        del self._loads[adapter]

    def cancel(self, adapter: Adapter, pages: list[int]) -> None:
        """End a load before its time; its pages are free once nothing writes to them."""
        transfer = adapter.transfer
        self.end(adapter)
        transfer.cancel()
        self._leaving.append((transfer, pages))
        self.free_what_is_quiet()

    def free_what_is_quiet(self) -> None:
        busy = []
        for transfer, pages in self._leaving:
            if transfer.is_quiet():
                self._pool.release(pages)
            else:
                busy.append((transfer, pages))
        self._leaving = busy

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """Pages of cancelled loads, for `PagePool.check_integrity`; an adapter's own are the store's to tell."""
        for _, pages in self._leaving:
            yield PageKind.ADAPTER, pages
