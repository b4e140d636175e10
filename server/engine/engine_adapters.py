"""The adapters of an engine by name: each question is answered between two of its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial, wraps
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ...core.requests.sampling_params import InvalidRequest
from ...memory.adapters.adapter import Tier
from ...memory.adapters.versions import versioned
from ...memory.files.error import AdapterFormatError
from .backend import AdapterListing, AdapterState

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...core.quarantine import Quarantined
    from ...memory.adapters.adapter import Adapter
    from ...memory.files.format import AdapterManifest
    from ...memory.host.image import HostImage

log = logging.getLogger(__name__)
audit = logging.getLogger("chorus.audit")

P = ParamSpec("P")
T = TypeVar("T")

MOST_OVERFLOWS = 3
"""Requests that may end for logits that are not finite before one has ended well; then the adapter is set aside."""


def between_steps(
    function: Callable[Concatenate[EngineAdapters, Engine, P], T],
) -> Callable[Concatenate[EngineAdapters, P], Future[T]]:
    """Have a method of the book get the engine, and run between two of its steps."""

    @wraps(function)
    def method(self: EngineAdapters, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self.call(lambda engine: function(self, engine, *args, **kwargs))

    return method


class EngineAdapters:
    """An `AdapterBook` over an engine. call: runs a function of the engine between two steps."""

    has_registry = False

    def __init__(self, call: Callable[[Callable[[Engine], Any]], Future[Any]]) -> None:
        self.call = call

    @between_steps
    def listing(self, engine: Engine) -> AdapterListing:
        states = partial(_states, engine, engine.store.registered())
        return AdapterListing(states, list(engine.adapters.quarantine.values()), engine.stats())

    @between_steps
    def state(self, engine: Engine, name: str) -> AdapterState:
        return _state(engine, name)

    @between_steps
    def put(
        self,
        engine: Engine,
        name: str,
        manifest: AdapterManifest,
        image: HostImage | None,
        *,
        replace: bool,
        label: str | None = None,
        keep: int | None = 1,
    ) -> tuple[AdapterState, bool]:
        store, replaced = engine.store, name in engine.store
        if replaced and not replace:
            raise FileExistsError(name)
        if label and any(one.label == label for one in engine.adapters.versions_of(name)):
            raise FileExistsError(versioned(name, label))
        was_pinned = replaced and store.is_pinned(store.get(name))
        store.register(name, manifest, image, label=label, keep=keep)
        if was_pinned:
            _pin_again(name, engine)
        engine.adapters.quarantine.pop(name, None)
        return _state(engine, name), replaced

    @between_steps
    def versions(self, engine: Engine, name: str) -> list[AdapterState]:
        names = [*([name] if name in engine.store else ()), *engine.store.kept(name)]
        return [_state(engine, each) for each in names]

    @between_steps
    def pause(self, engine: Engine, name: str, *, paused: bool) -> None:
        engine.store.get(name)
        (engine.adapters.paused.add if paused else engine.adapters.paused.discard)(name)

    @between_steps
    def num_requests(self, engine: Engine, name: str) -> int:
        return sum(one.requests - engine.store.is_pinned(one) for one in engine.adapters.versions_of(name))

    @between_steps
    def paths_in_use(self, engine: Engine) -> set[Path]:
        return {one.manifest.path for one in engine.store.versions()}

    @between_steps
    def count_from(self, engine: Engine, number: int) -> None:
        engine.store.count_from(number)

    @between_steps
    def remove(self, engine: Engine, name: str, *, force: bool) -> tuple[AdapterState, int]:
        return _state(engine, name), engine.adapters.remove(name, force=force)

    @between_steps
    def pin(self, engine: Engine, name: str) -> bool:
        return engine.adapters.pin(name)

    @between_steps
    def unpin(self, engine: Engine, name: str) -> None:
        engine.adapters.unpin(name)

    @between_steps
    def unhashed(self, engine: Engine) -> list[AdapterState]:
        return _states(engine, [each for each in engine.store.registered() if each[1].manifest.content_hash is None])

    @between_steps
    def quarantined(self, engine: Engine) -> list[Quarantined]:
        return list(engine.adapters.quarantine.values())

    @between_steps
    def note(self, engine: Engine, name: str, version: int, manifest: AdapterManifest) -> bool:
        if name not in engine.store or engine.store.get(name).version != version:
            return False
        engine.store.note(engine.store.get(name), manifest)
        return True

    @between_steps
    def overflowing(self, engine: Engine) -> list[AdapterState]:
        return _states(
            engine, [each for each in engine.store.cached() if (each[1].num_overflows or 0) >= MOST_OVERFLOWS]
        )

    @between_steps
    def set_aside(self, engine: Engine, one: Quarantined, version: int, *, in_use: bool) -> bool:
        store = engine.store
        if one.name not in store or store.get(one.name).version != version:
            return True
        adapter = store.get(one.name)
        tier = store.tier(adapter)
        on_disk = tier in (Tier.DISK, Tier.FAILED)
        if not in_use and (tier is Tier.LOADING or (adapter.requests and on_disk)):
            return False
        if on_disk or in_use:
            store.unregister(one.name)
            engine.adapters.quarantine[one.name] = one
            audit.warning("adapter %s is not served any more: %s", one.name, one.reason)
        return True

    @between_steps
    def keep_aside(self, engine: Engine, one: Quarantined) -> None:
        if one.name in engine.adapters.quarantine:
            engine.adapters.quarantine[one.name] = one

    @between_steps
    def release(self, engine: Engine, name: str, manifest: AdapterManifest, image: HostImage | None) -> bool:
        if engine.adapters.quarantine.pop(name, None) is None or name in engine.store:
            return False
        engine.store.register(name, manifest, image)
        return True


def _state(engine: Engine, name: str) -> AdapterState:
    return AdapterState.of(engine, name, engine.store.get(name))


def _states(engine: Engine, registered: Iterable[tuple[str, Adapter]]) -> list[AdapterState]:
    return [AdapterState.of(engine, *each) for each in sorted(registered, key=itemgetter(0))]


def _pin_again(name: str, engine: Engine) -> None:
    """Pin the new version of a pinned adapter, where there is room beside the old one that may still run."""
    try:
        pinned, reason = engine.adapters.pin(name), "it is still being read"
    except (InvalidRequest, AdapterFormatError) as error:
        pinned, reason = False, str(error)
    if not pinned:
        log.warning("adapter %s was pinned, its new version is not: %s", name, reason)
