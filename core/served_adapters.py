"""The adapters that an engine serves: checked, found by name, pinned, paused, removed, or in quarantine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..memory.adapters.adapter import Adapter, AdapterBackend
from ..memory.adapters.composition import Composition, InvalidComposition, read_composition
from ..memory.adapters.reclaimer import Reclaimer
from ..memory.adapters.store import UnknownAdapter
from ..memory.files.error import AdapterFormatError, LoadFailure, PagesInUse
from ..memory.files.identity import ContentHash, with_content, with_effect
from ..memory.files.manifest import AdapterManifest
from ..memory.host.image import HostImage
from .base_name import names_of, with_base
from .config import EngineConfig
from .quarantine import Quarantined, register_directories
from .requests.request import Request
from .requests.request_params import AdapterPaused, InvalidRequest, NotServed, UnknownModel

if TYPE_CHECKING:
    from .scheduling.scheduler import Scheduler


class ServedAdapters:
    """Names of adapters, for requests and for an operator; `AdapterStore` owns the adapters themselves."""

    def __init__(
        self,
        config: EngineConfig,
        files: AdapterBackend,
        reclaimer: Reclaimer,
        scheduler: Scheduler,
        *,
        requests: Callable[[], list[Request]],
        end: Callable[[Request, str, LoadFailure], None],
    ) -> None:
        """files: reads and checks adapters as the executor needs them. requests: returns all requests in progress.
        end: ends one with an error.
        """
        self._config = config
        self._files = files
        self._reclaimer = reclaimer
        self._store = reclaimer.store
        self._scheduler = scheduler
        self._requests, self._end = requests, end
        self._base_names = names_of(config.model, config.served_model_name)
        self.quarantine: dict[str, Quarantined] = {}
        """Adapters that are not served, by name."""
        self.paused: set[str] = set()
        """Names of adapters of which no version takes new requests."""

    def register_directories(self, modules: Sequence[tuple[str, Path]] = ()) -> None:
        """Register the adapters of the configuration's directory, and `modules`: each a name and its directory.

        One that can't be served goes into `quarantine`, unless the configuration says that it stops the start with
        AdapterFormatError.
        """
        self.quarantine = register_directories(self._store, self.inspect, self._config, modules)

    # -- checks

    def check(
        self,
        path: Path,
        roots: Sequence[Path] = (),
        image: HostImage | None = None,
        *,
        max_bytes: int | None = None,
    ) -> AdapterManifest:
        """Read and check an adapter directory, weights included, without registering it.

        roots: directories below which its files must lie; none: anywhere. image: takes the weights, for `register`.
        max_bytes: see `AdapterManifest.check_size`. It and `check_weights` may be called from any thread: they take as
        long as the disk does and no step waits for them. Raises AdapterFormatError.
        """
        manifest = self.inspect(path, roots)
        manifest.check_size(max_bytes)
        return self.check_weights(manifest, image)

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        """Read and check an adapter's configuration and the headers of its weights, as `check` does."""
        return with_base(self._files.inspect(path, roots), self._base_names, strict=self._config.strict_base)

    def check_weights(self, manifest: AdapterManifest, image: HostImage | None = None) -> AdapterManifest:
        """Read and check the weights of an adapter that was inspected; the manifest with their hash, and with whether
        they change nothing.
        """
        content = None if manifest.sources else ContentHash(manifest)
        self._files.read(manifest, self._store.layout_of(manifest), image or HostImage(), content)
        if manifest.tower:
            from .media.tower_adapter import check_changes

            check_changes(manifest)
        if content is None or content.value is None:
            return with_content(manifest)
        return replace(with_effect(manifest), content_hash=content.value)

    # -- names

    def forget_content(self, content_hash: str | None) -> None:
        """Remove the cached prefixes of an adapter's content from files, unless it is registered under another name."""
        disk = self._scheduler.disk
        if disk is not None and content_hash is not None and self._store.find(content_hash) is None:
            disk.writer.remove_owner(content_hash)

    def find(self, name: str, sibling: Request | None, tenant: str = "") -> Adapter:
        """The version of a name that a new request of a tenant is bound to: its call's, while that is held. Raises
        InvalidRequest, and AdapterPaused.
        """
        adapter = None if sibling is None else sibling.adapter
        if adapter is None or not adapter.requests:
            composition = _composition_of(name)
            adapter = self._find_one(name) if composition is None else self._composed(name, composition, tenant)
        for each in adapter.sources or (adapter,):
            if each.name in self.paused:
                raise AdapterPaused(each.name)
        return adapter

    def _find_one(self, name: str) -> Adapter:
        if name not in self._store and (one := self.quarantine.get(name)) is not None:
            raise NotServed("model", f"adapter {one.name!r} is not served: {one.reason}")
        try:
            return self._store.latest(name)
        except UnknownAdapter:
            raise UnknownModel(name) from None

    def _composed(self, name: str, composition: Composition, tenant: str) -> Adapter:
        parts = [(self._find_one(part), scale) for part, scale in composition.terms]
        try:
            return self._store.compose(name, parts, tenant)
        except AdapterFormatError as error:
            raise InvalidRequest("adapters", str(error)) from None

    def versions_of(self, name: str) -> list[Adapter]:
        """Return all versions of a name that are registered, or that requests still hold."""
        return [adapter for adapter in self._store.versions() if adapter.name == name]

    def versions_with(self, name: str) -> list[Adapter]:
        """The same, and the versions that are composed of any of them."""
        return [one for one in self._store.versions() if any(each.name == name for each in (one, *one.sources))]

    def pin(self, name: str) -> bool:
        """Load an adapter, or have it loaded at the end of a sleep, and keep it resident. False while it is being read:
        nothing is pinned then, so ask again.

        No step waits for the disk here. UnknownAdapter, the reason why it can't be read, InvalidRequest when pinned
        adapters would take more than half of the arena, or PagesInUse while requests hold what it needs.
        """
        store = self._store
        adapter = store.get(name)
        if adapter in store.pins:
            return True
        pinned, usable = store.pins.num_pages + adapter.num_pages, self._reclaimer.pool.num_usable
        if 2 * pinned > usable:
            message = f"pinned adapters would take {pinned} of {usable} pages, more than half; unpin others or raise "
            raise InvalidRequest("pin", message + "memory_bytes")
        if not store.loads.fetch(adapter):
            return False
        if not (adapter.pages or store.pins.is_asleep or self._reclaimer.make_room(adapter.num_pages)):
            raise PagesInUse(
                f"adapter {adapter.name!r} needs {adapter.num_pages} pages; requests in progress and pinned adapters "
                f"hold all but {self._reclaimer.available} of {usable}: ask again when some requests have ended"
            )
        if not store.loads.fetch(adapter):  # images of evicted adapters may have taken the room of its own
            return False
        store.pins.add(adapter)
        return True

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again when idle. UnknownAdapter if absent."""
        self._store.pins.remove(self._store.get(name))

    def remove(self, name: str, *, force: bool = False) -> int:
        """Forget an adapter; returns how many requests were ended for it. UnknownAdapter if absent.

        Its kept versions are forgotten, too; `name@version` is one version alone, and if it was the newest, the name
        means the latest kept one. Requests that hold any of them finish with it, then its pages go back. force: they
        end with an error, and the pages are free at once.
        """
        store = self._store
        adapter = store.get(name)
        if name not in store:
            store.unregister_newest(adapter.name)
        gone = [adapter]
        for each in (name, *store.kept(name)) if name in store else ():
            gone.append(store.get(each))
            store.unregister(each)
        for each in gone:
            self.forget_content(each.manifest.content_hash)
        if adapter.name not in store and not store.kept(adapter.name):
            self.paused.discard(adapter.name)
        if not force:
            return 0
        users = [
            request
            for request in self._requests()
            if (version := request.changed_by) is not None
            and any(
                each is adapter or each.name == name  # a name has the versions, too, that only composed ones hold
                for each in (version, *version.sources)
            )
        ]
        for request in users:
            self._end(request, f"adapter {name!r} was removed", LoadFailure.REMOVED)
        return len(users)


def _composition_of(name: str) -> Composition | None:
    try:
        return read_composition(name)
    except InvalidComposition as error:
        raise InvalidRequest("adapters", str(error)) from None
