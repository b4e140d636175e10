"""The adapters of an engine by name: each question is answered between two of its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.requests.sampling_params import InvalidRequest
from ...memory.adapters.adapter import Tier
from ...memory.adapters.versions import versioned
from ...memory.files.error import AdapterFormatError
from .backend import AdapterListing, AdapterState

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...core.quarantine import Quarantined
    from ...memory.files.format import AdapterManifest
    from ...memory.host.image import HostImage

log = logging.getLogger(__name__)
audit = logging.getLogger("chorus.audit")

T = TypeVar("T")

MOST_OVERFLOWS = 3
"""Requests that may end for logits that are not finite before one has ended well; then the adapter is set aside."""


class EngineAdapters:
    """An `AdapterBook` over an engine. call: runs a function of the engine between two steps."""

    has_registry = False

    def __init__(self, call: Callable[[Callable[[Engine], Any]], Future[Any]]) -> None:
        self._call = call

    def listing(self) -> Future[AdapterListing]:
        return self._call(
            lambda engine: AdapterListing(
                _states(engine, engine.store.names()),
                list(engine.adapters.quarantine.values()),
                engine.stats(),
            )
        )

    def state(self, name: str) -> Future[AdapterState]:
        return self._call(lambda engine: _state(engine, name))

    def put(
        self,
        name: str,
        manifest: AdapterManifest,
        image: HostImage | None,
        *,
        replace: bool,
        label: str | None = None,
        keep: int | None = 1,
    ) -> Future[tuple[AdapterState, bool]]:
        return self._call(partial(_put, name, manifest, image, replace, label, keep))

    def versions(self, name: str) -> Future[list[AdapterState]]:
        return self._call(
            lambda engine: _states(engine, [*([name] if name in engine.store else ()), *engine.store.kept(name)])
        )

    def pause(self, name: str, *, paused: bool) -> Future[None]:
        return self._call(partial(_pause, name, paused))

    def num_requests(self, name: str) -> Future[int]:
        return self._call(
            lambda engine: sum(one.requests - engine.store.is_pinned(one) for one in engine.adapters.versions_of(name))
        )

    def paths_in_use(self) -> Future[set[Path]]:
        return self._call(lambda engine: {one.manifest.path for one in engine.store.versions()})

    def count_from(self, number: int) -> Future[None]:
        return self._call(lambda engine: engine.store.count_from(number))

    def remove(self, name: str, *, force: bool) -> Future[tuple[AdapterState, int]]:
        return self._call(lambda engine: (_state(engine, name), engine.adapters.remove(name, force=force)))

    def pin(self, name: str) -> Future[bool]:
        return self._call(lambda engine: engine.adapters.pin(name))

    def unpin(self, name: str) -> Future[None]:
        return self._call(lambda engine: engine.adapters.unpin(name))

    def unhashed(self) -> Future[list[AdapterState]]:
        return self._call(_unhashed)

    def quarantined(self) -> Future[list[Quarantined]]:
        return self._call(lambda engine: list(engine.adapters.quarantine.values()))

    def note(self, name: str, version: int, manifest: AdapterManifest) -> Future[bool]:
        return self._call(partial(_note, name, version, manifest))

    def overflowing(self) -> Future[list[AdapterState]]:
        return self._call(_overflowing)

    def set_aside(self, one: Quarantined, version: int, *, in_use: bool) -> Future[bool]:
        return self._call(partial(_set_aside, one, version, in_use))

    def keep_aside(self, one: Quarantined) -> Future[None]:
        return self._call(partial(_keep_aside, one))

    def release(self, name: str, manifest: AdapterManifest, image: HostImage | None) -> Future[bool]:
        return self._call(partial(_release, name, manifest, image))


def _state(engine: Engine, name: str) -> AdapterState:
    store = engine.store
    adapter = store.get(name)
    pinned = store.is_pinned(adapter)
    credit = None if engine.modes is None else engine.modes.credit(adapter)
    return AdapterState(
        name, adapter.version, adapter.manifest, store.tier(adapter).value, len(adapter.pages),
        adapter.references - pinned, pinned, credit, adapter.label, adapter.name in engine.adapters.paused,
    )  # fmt: skip


def _states(engine: Engine, names: Iterable[str]) -> list[AdapterState]:
    return [_state(engine, name) for name in names]


def _put(
    name: str,
    manifest: AdapterManifest,
    image: HostImage | None,
    replace: bool,
    label: str | None,
    keep: int | None,
    engine: Engine,
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


def _pause(name: str, paused: bool, engine: Engine) -> None:
    engine.store.get(name)
    (engine.adapters.paused.add if paused else engine.adapters.paused.discard)(name)


def _pin_again(name: str, engine: Engine) -> None:
    """Pin the new version of a pinned adapter, where there is room beside the old one that may still run."""
    try:
        pinned, reason = engine.adapters.pin(name), "it is still being read"
    except (InvalidRequest, AdapterFormatError) as error:
        pinned, reason = False, str(error)
    if not pinned:
        log.warning("adapter %s was pinned, its new version is not: %s", name, reason)


def _note(name: str, version: int, manifest: AdapterManifest, engine: Engine) -> bool:
    if name not in engine.store or engine.store.get(name).version != version:
        return False
    engine.store.get(name).manifest = manifest
    return True


def _unhashed(engine: Engine) -> list[AdapterState]:
    return [one for one in _states(engine, engine.store.names()) if one.manifest.content_hash is None]


def _overflowing(engine: Engine) -> list[AdapterState]:
    store = engine.store
    return _states(engine, (name for name in store.names() if (store.get(name).num_overflows or 0) >= MOST_OVERFLOWS))


def _set_aside(one: Quarantined, version: int, in_use: bool, engine: Engine) -> bool:
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


def _keep_aside(one: Quarantined, engine: Engine) -> None:
    if one.name in engine.adapters.quarantine:
        engine.adapters.quarantine[one.name] = one


def _release(name: str, manifest: AdapterManifest, image: HostImage | None, engine: Engine) -> bool:
    if engine.adapters.quarantine.pop(name, None) is None or name in engine.store:
        return False
    engine.store.register(name, manifest, image)
    return True
