"""Interface between the app and its backend: an engine of this process, or replicas reached through sockets.

Tests: tests/server/engine/test_worker.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...core.requests.types import RequestOutput
from ...memory.pages.block import Medium
from .backend_adapters import BackendAdapters
from .engine_view import EngineView

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from ...core.engine_stats import EngineStats
    from ...core.executors.base import ModelInfo
    from ...core.kv_events import KvEvents
    from ...core.requests.request import Request
    from ...memory.files.manifest import AdapterManifest
    from ...memory.host.image import HostImage
    from .engine_view import Picture

OnOutput = Callable[[RequestOutput], None]

Settle = Callable[["AdapterManifest"], "AdapterManifest"]
"""Moves the files of a checked adapter, and returns the manifest of where they stay."""


SHUTTING_DOWN = "the server is shutting down"


def in_place(manifest: AdapterManifest) -> AdapterManifest:
    """Leave the files where they are."""
    return manifest


class Backend(Protocol):
    """The interface that the app uses. Methods may be called from any thread."""

    progress: int | None
    """Changes with every step; None while idle, or if the watchdog need not watch this backend."""
    stalled: str | None
    """Why the engine does not respond at the moment; set by the watchdog."""
    failure: str | None
    """Why no more requests are accepted, for good."""
    shared: Path | None
    """Directory shared by all processes that serve the same clients; None: there is one process."""

    @property
    def collector(self) -> Collector | None:
        """Metrics in addition to the engine's."""
        ...

    @property
    def adapters(self) -> BackendAdapters: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def trouble(self) -> str | None:
        """Why it is not healthy."""
        ...

    def take_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which to serve the app. The caller runs it and closes it at the end."""
        ...

    def stop(self, timeout: float | None = 10.0) -> None: ...

    def cancel_all(self, reason: str) -> int:
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

    def record_kv_events(self) -> Future[tuple[KvEvents, int]]:
        """Record the blocks that enter and leave the prefix cache; the result has the tokens per block, too.

        The future fails with RuntimeError if the backend has no prefix cache of its own.
        """
        ...

    def freeze(self, *, frozen: bool) -> Future[Any]:
        """Stop stepping, or continue. The future fails with InvalidRequest if the backend does not support it."""
        ...

    def sleep(self) -> Future[Any]:
        """Freeze, and free the memory of the pages. The future fails with InvalidRequest if the backend can't, and with
        CannotSleep.
        """
        ...

    def wake(self) -> Future[Any]:
        """End `sleep`; the backend stays frozen."""
        ...

    def reset_prefix_cache(
        self, *, reset_running_requests: bool, tiers: Collection[Medium] = tuple(Medium)
    ) -> Future[int]:
        """See `Engine.reset_prefix_cache`. The future fails with InvalidRequest if the backend does not support it."""
        ...

    def reset_image_rows(self) -> Future[int]:
        """See `Engine.reset_image_rows`."""
        ...

    def view(self) -> Future[EngineView]:
        """A snapshot for metrics."""
        ...

    def picture(self) -> Future[Picture]:
        """A snapshot for the operator's page."""
        ...

    def check_adapter(
        self,
        path: Path,
        roots: Sequence[Path] = (),
        image: HostImage | None = None,
        settle: Settle = in_place,
        *,
        everywhere: bool = False,
        max_bytes: int | None = None,
    ) -> AdapterManifest:
        """Read, check and hash an adapter on the caller's thread. image: receives the weights, for `put`. settle: moves
        the files, once they are hashed, and returns the manifest of where they stay. everywhere: fail unless every
        replica can load it; otherwise one of a cluster's is enough. max_bytes: see `AdapterManifest.check_size`.

        Raises AdapterFormatError.
        """
        ...

    def check_weights(self, manifest: AdapterManifest) -> AdapterManifest: ...
