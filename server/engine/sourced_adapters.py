"""Fetches unregistered adapters, which requests name, from the store that a rule gives, and loads them."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.requests.request_params import AdapterPaused, InvalidRequest, NotServed, UnknownModel
from ...memory.adapters.composition import read_composition
from ...memory.adapters.store import UnknownAdapter
from ...memory.adapters.versions import split_version
from ...memory.files.error import AdapterFormatError
from ..errors import DISK_FAULTS, ApiError, clipped, not_served
from ..executors import DaemonPool, PoolFull
from ..settings import Settings
from ..stores.allowed import Allowed
from ..stores.cache import Cache
from ..stores.download import download
from ..stores.errors import CacheFull, NotInStore, StoreAway, StoreError, StoreRefused
from ..stores.rules import Location
from .adapter_loader import AdapterLoader, LoadTimedOut
from .backend_adapters import BackendAdapters
from .generation import Generation
from .load_source import LoadSource

log = logging.getLogger(__name__)

FETCH_THREADS = 16
"""Adapters fetched at once for one rule, so a store that hangs delays no other rule's."""

MAX_FETCHES = 128
"""Adapters of one rule that are being fetched or wait for it."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, ABSENT_SECONDS = 10.0, 600.0, 30.0
"""Seconds for which a store is not asked again for an adapter after a failure: doubled each time up to the second
value; at most the third if the store does not have the adapter.
"""

MAX_FAILURES = 4096
"""Failures that are remembered; clients choose the names."""

TOUCH_SECONDS = 60.0
"""Precision of the time of an adapter's last use, in seconds."""

BY = "a request"
"""Name in the log for the loads of requests."""


Until = Callable[[Coroutine[Any, Any, bool | None]], Awaitable[bool | None]]


async def _awaited(work: Coroutine[Any, Any, bool | None]) -> bool | None:
    return await work


@dataclass(frozen=True, slots=True)
class _Failure:
    """The reason why an adapter could not be fetched, and the time until which its store is not asked again."""

    error: StoreError
    pause: float
    until: float

    def answer(self, name: str) -> ApiError:
        if isinstance(self.error, StoreRefused):
            return not_served(f"adapter {clipped(name)!r} is not served: {self.error}")
        message = f"adapter {clipped(name)!r} can't be fetched at the moment: {self.error}"
        wait = max(1.0, self.until - time.monotonic())
        return ApiError(503, message, param="model", code="adapter_source_unavailable", retry_after=wait)


class SourcedAdapters:
    """Adapters by rule. Its coroutines run on one event loop; disk and store accesses run on threads."""

    def __init__(self, settings: Settings, adapters: BackendAdapters, loads: AdapterLoader) -> None:
        self._settings = settings
        self._adapters = adapters
        self._loads = loads
        self._rules = settings.adapter_rules
        self._roots = tuple(root.resolve() for root in settings.loadable_from)
        self._allowed = Allowed(settings.adapter_source_hosts)
        self._pools: dict[int, DaemonPool] = defaultdict(
            lambda: DaemonPool("fetch", FETCH_THREADS, MAX_FETCHES - FETCH_THREADS)
        )
        self._care = DaemonPool("adapter-cache", threads=1)
        self._opening = threading.Lock()
        self._making_room = threading.Lock()
        self._opened: Cache | None = None
        self._coming: dict[str, asyncio.Task[bool]] = {}
        self._waiting: Counter[str] = Counter()
        self._fetches: dict[str, Future[Path]] = {}
        self._failures: dict[str, _Failure] = {}
        self._used: dict[str, float] = {}

    def stop(self) -> None:
        """Begin nothing more; waits for nothing."""
        for pool in (*self._pools.values(), self._care):
            pool.shutdown()

    async def bring(self, name: str) -> bool:
        """True once the adapter `name` can be requested; False if no rule or store has it. Raises ApiError.

        All requests for one name wait for the same load, which continues without them once it has begun.
        """
        found = self._rules.find(name)
        if found is None or self._settings.is_reserved(name):
            return False
        failure = self._failures.get(name)
        if failure is not None and time.monotonic() < failure.until:
            return self._fail(name, failure)
        coming = self._coming.get(name)
        if coming is None:
            coming = self._coming[name] = asyncio.ensure_future(self._bring(name, *found))
            coming.add_done_callback(lambda done: self._arrived(name, done))
        self._waiting[name] += 1
        try:
            return await asyncio.shield(coming)
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]
                if (fetch := self._fetches.get(name)) is not None:
                    fetch.cancel()

    async def start(self, generation: Generation, until: Until = _awaited) -> None:
        """Submit a generation to the engine, after its adapter was fetched if it is not registered.

        until: awaits both, or stops when the client disconnects: no replica may be there to accept it for long. Raises
        the errors of `Generation.start`, and ApiError.
        """
        missing = set(names := _names_of(generation))
        while True:
            try:
                await until(generation.start())
                break
            except (NotServed, AdapterPaused):
                raise
            except InvalidRequest as error:
                unknown = _unknown(error, names)
                if unknown is None or unknown not in missing or not await until(self.bring(unknown)):
                    raise
                missing.remove(unknown)
        for name in names:
            self.note_use(name)

    def note_use(self, name: str | None) -> None:
        """Note that a request uses an adapter, which may be one of a store."""
        if name is not None and self._used.get(name, math.inf) + TOUCH_SECONDS < time.monotonic():
            self._used[name] = time.monotonic()
            self._tell_cache(name, Cache.touch)

    def forget(self, name: str) -> None:
        """Fetch a removed adapter again at the next request for it."""
        self._used.pop(name, None)
        self._failures.pop(name, None)
        self._tell_cache(name, Cache.forget)

    # --- on the event loop ---

    def _arrived(self, name: str, done: asyncio.Task[bool]) -> None:
        del self._coming[name]
        if not done.cancelled():
            done.exception()  # all requests that waited for it may have left

    def _fail(self, name: str, failure: _Failure) -> bool:
        if isinstance(failure.error, NotInStore):
            return False
        raise failure.answer(name)

    async def _bring(self, name: str, number: int, location: Location) -> bool:
        plain, version = split_version(name)
        if version and await asyncio.wrap_future(self._adapters.versions(plain)):
            return False  # a version that is not kept: nothing else may be used instead
        try:
            if location.scheme:
                path, most = await self._fetched(number, name, location), self._settings.adapter_source_bytes
                roots = (path.parent,)
            else:
                path, most = Path(location.url), None
                roots = self._roots
            await self._load(name, path, roots, most)
        except PoolFull as error:
            raise ApiError(503, f"{error}; try again later", code="loads_busy", retry_after=1) from None
        except StoreError as error:
            if isinstance(error, StoreRefused):
                self._tell_cache(name, Cache.forget)
            return self._fail(name, self._remember(name, location, error))
        self._failures.pop(name, None)
        self._used[name] = time.monotonic()
        return True

    async def _fetched(self, number: int, name: str, location: Location) -> Path:
        """The directory of an adapter in the cache. Raises StoreError, or PoolFull if it could not begin in time."""
        seconds = self._settings.adapter_source_seconds
        fetch = self._fetches[name] = self._pools[number].submit(self._fetch, name, location)
        try:
            async with asyncio.timeout(seconds + 1):
                return await asyncio.wrap_future(fetch)
        except TimeoutError:
            if fetch.cancelled():
                raise PoolFull(f"{FETCH_THREADS} adapters of its store are being fetched") from None
            raise StoreAway(f"its store took longer than {seconds:g} seconds (adapter_source_seconds)") from None
        except OSError as error:
            raise StoreAway("the server has no room for it, or its disk fails", str(error)) from None
        except (StoreError, PoolFull):
            raise
        except Exception as error:  # the files upset the library, and will again
            log.exception("adapter %s of %s", name, location.url)
            raise StoreRefused("its files can't be read", f"{type(error).__name__}: {error}") from None
        finally:
            del self._fetches[name]

    async def _load(self, name: str, path: Path, roots: tuple[Path, ...], max_bytes: int | None) -> None:
        def find() -> Path:
            if not path.is_dir():
                raise NotInStore("its store does not have it", f"there is no directory {path}")
            return path

        try:
            source = LoadSource(find, roots, max_bytes=max_bytes)
            await asyncio.wrap_future(self._loads.load(name, source, replace=False, by=BY))
        except FileExistsError:  # another API server, or an operator, was faster
            pass
        except AdapterFormatError as error:
            reason = str(error).replace(f"{path}/", "").replace(str(path), "its directory")
            kind = StoreAway if getattr(error.__cause__, "errno", None) in DISK_FAULTS else StoreRefused
            raise kind(reason, str(error)) from None
        except LoadTimedOut as error:
            raise StoreAway(str(error)) from None

    def _remember(self, name: str, location: Location, error: StoreError) -> _Failure:
        before = self._failures.pop(name, None)
        pause = FIRST_PAUSE_SECONDS if before is None else 2 * before.pause
        pause = min(pause, ABSENT_SECONDS if isinstance(error, NotInStore) else LONGEST_PAUSE_SECONDS)
        failure = self._failures[name] = _Failure(error, pause, time.monotonic() + pause)
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        level = logging.DEBUG if isinstance(error, NotInStore) else logging.WARNING
        log.log(
            level, "adapter %s of %s is not served: %s", name, location.url, f"{error.detail}; retry after {pause:g} s"
        )
        return failure

    def _tell_cache(self, name: str, what: Callable[[Cache, str, Location], None]) -> None:
        found = self._rules.find(name)
        if found is not None and found[1].scheme:
            try:
                self._care.submit(lambda: what(self._cache, name, found[1]))
            except PoolFull:
                log.warning("the cache of adapters is busy; %s keeps its space there", name)

    # --- on threads ---

    @property
    def _cache(self) -> Cache:
        with self._opening:
            if self._opened is None:
                settings = self._settings
                self._opened = Cache(
                    settings.fetched_adapters, settings.adapter_cache_bytes, settings.adapter_source_bytes
                )
            return self._opened

    def _fetch(self, name: str, location: Location) -> Path:
        cache = self._cache
        if (path := cache.find(name, location)) is not None:
            cache.touch(name, location)
            return path
        began = time.monotonic()
        with cache.content.draft() as draft:
            download(location, cache.content, draft, self._allowed, self._settings.adapter_source_seconds)
            path = cache.publish(draft, name, location)
            log.info(
                "adapter %s: %d bytes from %s in %.1f s", name, draft.num_bytes, location.url, time.monotonic() - began
            )
        self._make_room(cache, name)
        return path

    def _make_room(self, cache: Cache, newest: str) -> None:
        """Remove the least recently used adapters from the cache, and from the engine, until the new one fits."""
        with self._making_room:
            if cache.excess() <= 0:
                return
            cache.remove([])
            for entry in cache.entries():
                if cache.excess() <= 0:
                    return
                if entry.name not in self._coming and self._let_go(entry.name, cache.directory):
                    cache.remove([entry])
            if cache.excess() > 0:
                cache.remove([entry for entry in cache.entries() if entry.name == newest])
                raise CacheFull("the adapters in use leave no room for it (adapter_cache_bytes)")

    def _let_go(self, name: str, directory: Path) -> bool:
        """Unregister a fetched adapter; False while there are requests for it."""
        try:
            state = self._adapters.state(name).result()
            if state.manifest.path.is_relative_to(directory):
                if self._adapters.num_requests(name).result():
                    return False
                self._loads.remove_now(name, force=False)
        except UnknownAdapter:
            pass
        return True


def _names_of(generation: Generation) -> list[str]:
    """Names of the adapters of a generation: none, one or several."""
    name = generation.choices[0].request.adapter_name
    if name is None:
        return []
    composition = read_composition(name)
    return [name] if composition is None else [part for part, _ in composition.terms]


def _unknown(error: InvalidRequest, names: list[str]) -> str | None:
    """The adapter that an error says is not registered; None for another error."""
    if error.field != "model" or not names:
        return None
    return error.name if isinstance(error, UnknownModel) else names[0]
