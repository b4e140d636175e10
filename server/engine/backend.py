"""Interface between the app and its backend: an engine of this process, or replicas behind sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...core.requests.types import RequestOutput
from .engine_view import AdapterListing, AdapterState, EngineView

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from ...core.engine_stats import EngineStats
    from ...core.executors.base import ModelInfo
    from ...core.quarantine import Quarantined
    from ...core.requests.request import Request
    from ...memory.files.format import AdapterManifest
    from ...memory.host.image import HostImage
    from .picture import Picture

OnOutput = Callable[[RequestOutput], None]

SHUTTING_DOWN = "the server is shutting down"


class AdapterBook(Protocol):
    """Adapters by name. Methods may be called from any thread; UnknownAdapter for a name that is not registered."""

    has_registry: bool
    """True if a cluster's registry keeps the names."""

    def listing(self) -> Future[AdapterListing]: ...
    def state(self, name: str) -> Future[AdapterState]: ...

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
        """Register what `check_adapter` checked, and whether it took another's place; once the future has ended, no
        request that asks for the newest version begins with the other. FileExistsError unless it may `replace`, and for
        a version that there is. label, keep: as of `AdapterStore.register`.
        """
        ...

    def versions(self, name: str) -> Future[list[AdapterState]]:
        """The newest version of a name and the kept ones; none of a name that is not registered."""
        ...

    def pause(self, name: str, *, paused: bool) -> Future[None]:
        """Refuse new requests of all versions of a name, with AdapterPaused, or take them again."""
        ...

    def num_requests(self, name: str) -> Future[int]:
        """Requests in progress of all versions of a name, also of retired ones."""
        ...

    def paths_in_use(self) -> Future[set[Path]]:
        """Directories of all versions that are registered, or that requests still hold."""
        ...

    def count_from(self, number: int) -> Future[None]:
        """Give no version a number below this one."""
        ...

    def remove(self, name: str, *, force: bool) -> Future[tuple[AdapterState, int]]:
        """Forget an adapter; what it was, and how many requests were ended for it: none unless `force`."""
        ...

    def pin(self, name: str) -> Future[bool]:
        """Keep an adapter resident. False while it is being read: ask again."""
        ...

    def unpin(self, name: str) -> Future[None]: ...

    def unhashed(self) -> Future[list[AdapterState]]:
        """Adapters without a known content hash."""
        ...

    def quarantined(self) -> Future[list[Quarantined]]:
        """Adapters that are not served because they are broken."""
        ...

    def note(self, name: str, version: int, manifest: AdapterManifest) -> Future[bool]:
        """Keep what was found out about a version; False if it is not the current one any more."""
        ...

    def overflowing(self) -> Future[list[AdapterState]]:
        """Adapters to quarantine: none of their requests has had finite logits, and there were enough to judge."""
        ...

    def set_aside(self, one: Quarantined, version: int, *, in_use: bool) -> Future[bool]:
        """Into quarantine, unless it was replaced meanwhile; False to ask again later. in_use: one that has been
        loaded, too; else it has turned out to be whole.
        """
        ...

    def keep_aside(self, one: Quarantined) -> Future[None]:
        """Keep a quarantined adapter so, with another reason, unless it was replaced meanwhile."""
        ...

    def release(self, name: str, manifest: AdapterManifest, image: HostImage | None) -> Future[bool]:
        """Out of quarantine; False if it was removed or replaced meanwhile."""
        ...


class Backend(Protocol):
    """What the app needs of an engine; methods may be called from any thread."""

    progress: int | None
    """Number that changes with every step; None while there is nothing to do, or while others watch over it."""
    stalled: str | None
    """Reason why the engine can't be asked just now; the watchdog's."""
    failure: str | None
    """Reason why no more requests are taken, for good."""
    shared: Path | None
    """Directory of all processes that serve the same clients; None: this one is alone."""

    @property
    def collector(self) -> Collector | None:
        """Metrics beside the engine's."""
        ...

    @property
    def adapters(self) -> AdapterBook: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def trouble(self) -> str | None:
        """Reason why it is not healthy."""
        ...

    def take_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop to serve the app on, once the app is there; the caller runs it, and closes it at the end."""
        ...

    def stop(self, timeout: float | None = 10.0) -> None: ...

    def give_up(self, reason: str) -> int:
        """End all requests in progress; returns how many."""
        ...

    def submit(
        self, request: Request, on_output: OnOutput, loop: asyncio.AbstractEventLoop | None = None
    ) -> Future[None]:
        """Queue a request; the future ends when it is accepted, or with InvalidRequest.

        `on_output` is called with every output, on `loop` or on the backend's thread.
        """
        ...

    def abort(self, request_id: str) -> Future[bool]: ...

    def check_room(self, tenant: str, adapter_name: str | None, count: int) -> None:
        """Raise Overloaded when `count` more requests would not be accepted now."""
        ...

    def freeze(self, *, frozen: bool) -> Future[None]:
        """Begin no step, or go on. The future's error: InvalidRequest where that can't be."""
        ...

    def view(self) -> Future[EngineView]:
        """A snapshot for metrics."""
        ...

    def picture(self) -> Future[Picture]:
        """A snapshot for the operator's page."""
        ...

    def check_adapter(self, path: Path, roots: Sequence[Path] = (), image: HostImage | None = None) -> AdapterManifest:
        """Read and check an adapter on the caller's thread. AdapterFormatError. image: takes the weights, for `put`."""
        ...

    def check_weights(self, manifest: AdapterManifest) -> AdapterManifest: ...
