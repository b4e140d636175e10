"""The adapters of an engine by name: each query runs between two of its steps.

Tests: tests/server/engine/test_many_adapters.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.requests.request_params import InvalidRequest
from ...memory.adapters.adapter import Adapter, Tier
from ...memory.files.composed import paths_of
from ...memory.files.error import AdapterFormatError
from ...memory.transfers.transfer import ExecutorLost
from .backend_adapters import AdapterTable, BackendAdapters, is_current
from .engine_view import AdapterState

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...core.quarantine import Quarantined
    from ...memory.files.manifest import AdapterManifest
    from ...memory.host.image import HostImage

log = logging.getLogger(__name__)
audit = logging.getLogger("chorus.audit")

T = TypeVar("T")

MOST_OVERFLOWS = 3
"""Requests with non-finite logits after which an adapter is quarantined, if none has ended well before."""


class EngineNames:
    """`AdapterTable` of an engine, on its thread. Any thread may call `state_of`: it reads one attribute or entry after
    another, so no step has to wait for it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._store = engine, engine.store
        self.quarantine, self.paused = engine.adapters.quarantine, engine.adapters.paused
        self.get, self.kept, self.registered = engine.store.get, engine.store.kept, engine.store.registered
        self.state_of, self.stats = partial(AdapterState.of, engine), engine.stats

    def __contains__(self, name: str, /) -> bool:
        return name in self._store

    def register(
        self,
        name: str,
        manifest: AdapterManifest,
        image: HostImage | None,
        *,
        label: str | None = None,
        keep: int | None = 1,
    ) -> None:
        was_pinned = name in self and self.get(name) in self._store.pins
        self._store.register(name, manifest, image, label=label, keep=keep)
        if was_pinned:
            self._pin_again(name)
        self.quarantine.pop(name, None)

    def last_number(self, name: str) -> int:
        return self._store.last_number(name)

    def has_version(self, name: str, label: str) -> bool:
        return any(one.label == label for one in self._engine.adapters.versions_of(name))

    def learn(self, name: str, manifest: AdapterManifest) -> None:
        self._store.note(self.get(name), manifest)

    def set_aside(self, one: Quarantined, version: int, *, in_use: bool) -> bool:
        """See `BackendAdapters.set_aside`."""
        if not is_current(self, one.name, version):
            return True
        adapter = self.get(one.name)
        tier = self._store.tier(adapter)
        on_disk = tier in (Tier.DISK, Tier.FAILED)
        if not in_use and (tier is Tier.LOADING or (adapter.requests and on_disk)):
            return False
        if on_disk or in_use:
            self._store.unregister(one.name)
            self.quarantine[one.name] = one
            audit.warning("adapter %s is no longer served: %s", one.name, one.reason)
        return True

    def _pin_again(self, name: str) -> None:
        """Pin the new version of a pinned adapter, if there is room for it next to the old one, which may still run."""
        try:
            pinned, reason = self._engine.adapters.pin(name), "it is still being read"
        except ExecutorLost:
            raise
        except (InvalidRequest, AdapterFormatError) as error:
            pinned, reason = False, str(error)
        except Exception as error:  # the adapter is registered, and recorded, whatever its load raises
            log.exception("loading %s to pin it failed", name)
            pinned, reason = False, repr(error)
        if not pinned:
            log.warning("adapter %s was pinned, its new version is not: %s", name, reason)


class EngineAdapters(BackendAdapters):
    """The adapters of an engine, by name. call: runs a function of the engine between two steps. tell_ended: informs
    clients of cancelled requests, even while no step runs. get: `AdapterStore.latest`, from any thread.
    """

    def __init__(
        self,
        call: Callable[[Callable[[Engine], Any]], Future[Any]],
        tell_ended: Callable[[Engine], None] = lambda _: None,
        *,
        get: Callable[[str], Adapter],
    ) -> None:
        super().__init__()
        self.call = call
        self._get = get
        self._tell_ended = tell_ended

    def version_of(self, name: str) -> Adapter:
        return self._get(name)

    def _ask(self, function: Callable[[AdapterTable], T]) -> Future[T]:
        return self.call(lambda engine: function(EngineNames(engine)))

    def num_requests(self, name: str) -> Future[int]:
        return self.call(
            lambda engine: sum(one.requests - (one in engine.store.pins) for one in engine.adapters.versions_with(name))
        )

    def paths_in_use(self) -> Future[set[Path]]:
        return self.call(
            lambda engine: {path for one in engine.store.versions() for path in paths_of(one.manifest.path)}
        )

    def remove(self, name: str, *, force: bool) -> Future[tuple[AdapterState, int]]:
        def remove(engine: Engine) -> tuple[AdapterState, int]:
            state = AdapterState.of(engine, name, engine.store.get(name))
            ended = engine.adapters.remove(name, force=force)
            if ended:
                self._tell_ended(engine)
            return state, ended

        return self.call(remove)

    def pin(self, name: str) -> Future[bool]:
        return self.call(lambda engine: engine.adapters.pin(name))

    def unpin(self, name: str) -> Future[None]:
        return self.call(lambda engine: engine.adapters.unpin(name))

    def overflowing(self) -> Future[list[AdapterState]]:
        def overflowing(engine: Engine) -> list[AdapterState]:
            found = [each for each in engine.store.cached() if (each[1].num_overflows or 0) >= MOST_OVERFLOWS]
            return [AdapterState.of(engine, *each) for each in found]

        return self.call(overflowing)

    def set_aside(self, one: Quarantined, version: int, *, in_use: bool) -> Future[bool]:
        return self.call(lambda engine: EngineNames(engine).set_aside(one, version, in_use=in_use))
