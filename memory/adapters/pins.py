"""Pinned adapters, whose pages stay until they are unpinned. A pin outlasts the engine's sleep, which takes the pages.

Tests: tests/memory/adapters/test_adapter_store.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..transfers.transfer import ExecutorLost

if TYPE_CHECKING:
    from .adapter import Adapter


class Pins:
    """The pinned versions of a store. Each is held as by a request; awake, its pages are held as by a running one."""

    def __init__(
        self,
        acquire: Callable[[Adapter], None],
        release: Callable[[Adapter], None],
        let_go: Callable[[Adapter], None],
    ) -> None:
        """acquire, release, let_go: of the store."""
        self._acquire, self._release, self._let_go = acquire, release, let_go
        self._pinned: dict[Adapter, None] = {}  # a dict keeps the order in which they were pinned
        self.is_asleep = False

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter in self._pinned

    def holds_pages_of(self, adapter: Adapter) -> bool:
        """True if one of the adapter's references is a pin's."""
        return adapter in self._pinned and not self.is_asleep

    @property
    def num_pages(self) -> int:
        """Pages that pinned adapters need, whether they have them or not."""
        return sum(adapter.num_pages for adapter in self._pinned) if self._pinned else 0

    def add(self, adapter: Adapter) -> None:
        """Keep an adapter resident until `remove`, loading it into free pages now, or after the sleep. Raises the
        errors of `AdapterStore.acquire`.
        """
        if adapter not in self._pinned:
            if not self.is_asleep:
                self._acquire(adapter)
            self._pinned[adapter] = None
            adapter.requests += 1

    def remove(self, adapter: Adapter) -> None:
        """Let a pinned adapter be evicted again when it is idle. Does nothing if it is not pinned."""
        if adapter in self._pinned:
            del self._pinned[adapter]
            if not self.is_asleep:
                self._release(adapter)
            self._let_go(adapter)

    def sleep(self) -> None:
        """Let the pages go; the adapters stay pinned."""
        if not self.is_asleep:
            self.is_asleep = True
            for adapter in self._pinned:
                self._release(adapter)

    def wake(self) -> list[tuple[Adapter, Exception]]:
        """Load the adapters again. Those that can't be are no longer pinned: they are returned, with the errors. Raises
        ExecutorLost and MemoryError; then the adapters are pinned, and asleep, as before.
        """
        failed: list[tuple[Adapter, Exception]] = []
        if not self.is_asleep:
            return failed
        acquired: list[Adapter] = []
        try:
            for adapter in self._pinned:
                try:
                    self._acquire(adapter)
                    acquired.append(adapter)
                except (ExecutorLost, MemoryError):
                    raise
                except Exception as error:  # of one adapter: the others must wake
                    failed.append((adapter, error))
        except BaseException:  # so that it can be tried again
            for adapter in acquired:
                self._release(adapter)
            raise
        self.is_asleep = False
        for adapter, _ in failed:
            del self._pinned[adapter]
            self._let_go(adapter)
        return failed
