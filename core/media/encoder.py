"""Encodes the images of waiting requests on threads of its own: while one prepares an image, another encodes.

A request waits here for its own images alone; no step waits. Tenants take turns, an image each. The threads, and
those of torch that they start, run at a low priority. Rows for the next use of an image: see `RowCache`.

Tests: tests/core/media/test_encoder.py, tests/core/media/test_served_images.py
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ...memory.files.error import AdapterFormatError, LoadFailure
from ...memory.files.given_up import GivenUp, wanted_while
from ..requests.media import MediaItem
from .background import work_in_background
from .images import BadImage
from .row_cache import RowCache, Rows, RowsKey

if TYPE_CHECKING:
    from ...memory.host.budget import HostBudget
    from ..requests.request import BoundVersion, Request
    from .linear import TowerChanges
    from .processor import Prepared

logger = logging.getLogger(__name__)

THREADS = 2
"""One for the tenant whose image must be decoded first, and one for others. Only one encodes at a time."""

_MEMORY_CHECK_SECONDS = 0.02


class RowMaker(Protocol):
    """The model's part: images and towers."""

    def prepare(self, item: MediaItem) -> Prepared: ...
    def changes(self, bound: BoundVersion) -> TowerChanges | None: ...
    def encode(self, prepared: Prepared, changes: TowerChanges | None) -> torch.Tensor: ...


class Encoded(NamedTuple):
    """A request whose images are encoded, or can't be."""

    request: Request
    error: str | None = None
    failure: LoadFailure | None = None
    used: Sequence[tuple[RowsKey, Rows]] = ()
    """The rows that it got, for others."""


@dataclass(slots=True)
class _Begun:
    """A request of which some images are encoded."""

    changes: Callable[[], TowerChanges | None]
    """Of its adapter, read once."""
    lent: list[torch.Tensor] = field(default_factory=list)
    used: list[tuple[RowsKey, Rows]] = field(default_factory=list)


class ImageEncoder:
    """See the module. All methods but those of the threads are called by the engine's thread."""

    def __init__(
        self,
        maker: Callable[[], RowMaker],
        num_bytes: int,
        threads: int,
        wake: Callable[[], None],
        budget: HostBudget,
        *,
        share: bool = False,
    ) -> None:
        """maker: reads the tower; called on an encoder's thread with the first image. num_bytes: of rows and pixels
        that requests hold, and as many of rows for the next use, which count in the budget. share: between tenants.
        """
        self._make, self._bytes, self._threads, self._wake, self._share = maker, num_bytes, threads, wake, share
        self._maker: RowMaker | None = None
        self._changed = threading.Condition()
        self._making = threading.Lock()
        self._at_tower: deque[Request] = deque()  # the first one encodes, others wait for it
        self._busy: set[str] = set()  # tenants whose image a thread has
        self._waiting: OrderedDict[str, deque[Request]] = OrderedDict()  # by tenant; the first one is next
        self._begun: OrderedDict[str, _Begun] = OrderedDict()  # by request, those begun first first
        self._done: deque[Encoded] = deque()
        self._pending: dict[str, Request] = {}
        self._closed = False
        self._running: list[threading.Thread] = []
        self.cache = RowCache(num_bytes, budget)
        self._lent: weakref.WeakValueDictionary[RowsKey, torch.Tensor] = weakref.WeakValueDictionary()
        self._lent_seconds: dict[RowsKey, float] = {}  # that encoding them took
        self._live: dict[int, int] = {}  # bytes of rows that requests hold, by the number of each
        self._pixels: dict[int, int] = {}  # of those that the threads have, by their requests
        self._numbers = 0
        self.num_encoded = 0
        """Images that were encoded, not found."""
        self.num_found = 0
        """Images whose rows were there already."""

    # --- the engine's thread ---

    def has_work(self) -> bool:
        """True while a request waits for its images, or has not been taken yet."""
        return bool(self._pending)

    @property
    def num_pending(self) -> int:
        """Requests that wait here."""
        return len(self._pending)

    def pending(self) -> list[Request]:
        """The requests that wait here."""
        return [*self._pending.values()]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def num_waiting(self, tenant: str) -> int:
        """Requests of a tenant that wait for their images."""
        return sum(request.fairness_key == tenant for request in self._pending.values())

    def submit(self, request: Request) -> None:
        """Encode a request's images; `take` returns it afterwards."""
        with self._changed:
            self._pending[request.id] = request
            self._waiting.setdefault(request.fairness_key, deque()).append(request)
            while len(self._running) < THREADS:
                thread = threading.Thread(target=self._run, name="chorus-images", daemon=True)
                self._running.append(thread)
                thread.start()
            self._changed.notify()

    def take(self) -> list[Encoded]:
        """Requests whose images have been encoded since the last call. Their rows enter the cache."""
        found = []
        while self._done:
            one = self._done.popleft()
            for key, rows in one.used:
                self.cache.note_use(key, rows)
            if self._pending.pop(one.request.id, None) is one.request:
                found.append(one)
        return found

    def cancel(self, request_id: str) -> Request | None:
        """Forget a waiting request; None if there is none."""
        with self._changed:
            request = self._pending.pop(request_id, None)
            if request is not None and self._has_left(request):
                self._begun.pop(request_id, None)
        return request

    def _has_left(self, request: Request) -> bool:
        """Take a request out of the queue; False if it is not there. The caller holds the lock."""
        requests = self._waiting.get(request.fairness_key)
        if requests is None or request not in requests:
            return False
        requests.remove(request)
        if not requests:
            del self._waiting[request.fairness_key]
        return True

    def close(self) -> None:
        """End the threads after the image that one is encoding."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._running:
            thread.join()

    # --- its own threads ---

    def _run(self) -> None:
        work_in_background(self._threads)
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Encode an image of the next request; False at the end. It holds no reference to a request while it waits."""
        if (request := self._next()) is None:
            return False
        try:
            self._have_turn(request)
        finally:
            with self._changed:
                self._busy.discard(request.fairness_key)
                self._changed.notify_all()
        return True

    def _have_turn(self, request: Request) -> None:
        begun = self._begun.setdefault(request.id, _Begun(cache(partial(self._changes, request))))
        done = Encoded(request, used=(used := begun.used))
        try:
            if not self._encode(request, begun) and self._goes_on(request):
                return
        except AdapterFormatError as error:
            done = Encoded(request, str(error), error.failure, used)
        except BadImage as error:
            done = Encoded(request, f"an image {error}", used=used)
        except Exception as error:
            logger.exception("encoding the images of %s failed", request.id)
            done = Encoded(request, f"its images could not be encoded: {type(error).__name__}: {error}", used=used)
        self._begun.pop(request.id, None)
        self._done.append(done)
        self._wake()

    def _next(self) -> Request | None:
        """The next request, of the tenant whose turn it is, which is busy from then on; None at the end."""
        with self._changed:
            while (request := self._choose()) is None and not self._closed:
                self._changed.wait()
            if self._closed or request is None:
                return None
            self._has_left(request)
            if request.fairness_key in self._waiting:
                self._waiting.move_to_end(request.fairness_key)
            self._busy.add(request.fairness_key)
            return request

    def _choose(self) -> Request | None:
        """The next request whose tenant is not busy; None if there is none. The caller holds the lock."""
        if self._begun and self._held() > self._bytes:
            # others would hold rows, too, and could not be computed before they have all
            first = self._pending.get(next(iter(self._begun)))
            return None if first is None or first.fairness_key in self._busy else first
        return next((requests[0] for tenant, requests in self._waiting.items() if tenant not in self._busy), None)

    def _goes_on(self, request: Request) -> bool:
        """Have a request wait for its tenant's next turn, at the head; False if it is cancelled."""
        with self._changed:
            if self._pending.get(request.id) is not request:
                return False
            self._waiting.setdefault(request.fairness_key, deque()).appendleft(request)
            self._waiting.move_to_end(request.fairness_key)
            return True

    def _encode(self, request: Request, begun: _Begun) -> bool:
        """Encode the next of a request's images that has no rows yet; True if all have, or the request is cancelled."""
        for at, item in enumerate(request.media[len(begun.lent) :], len(begun.lent) + 1):
            if request.id not in self._pending:
                return True
            key = self._key(request, item)
            if (found := self._found(key)) is not None:
                self._use(key, found, begun)
                continue
            if not self._make_rows(request, item, key, begun):
                return True
            if at < len(request.media):
                return False
        request.media_rows[:] = begun.lent
        return True

    def _key(self, request: Request, item: MediaItem) -> RowsKey:
        tenant = "" if self._share else request.tenant
        return tenant, request.cache_salt, item.digest, request.media_scope

    def _maker_now(self) -> RowMaker:
        with self._making:
            if self._maker is None:
                self._maker = self._make()
            return self._maker

    def _changes(self, request: Request) -> TowerChanges | None:
        """What a request's adapter changes of the tower."""
        if not request.media_scope or request.bound is None:
            return None
        return self._maker_now().changes(request.bound)

    def _make_rows(self, request: Request, item: MediaItem, key: RowsKey, begun: _Begun) -> bool:
        """Give a request the rows of an image; False if it was cancelled."""
        maker = self._maker_now()
        changed = begun.changes()
        self._wait_for_room(request)
        began = time.perf_counter()
        try:
            with wanted_while(lambda: request.id in self._pending and not self._closed):
                prepared = maker.prepare(item)
        except GivenUp:
            return False
        if prepared.digest != item.digest:
            raise RuntimeError("the image was prepared otherwise where the request came in; run equal versions")
        seconds, number = time.perf_counter() - began, id(prepared)
        tensors = [each for each in prepared.tensors.values() if isinstance(each, torch.Tensor)]
        self._pixels[number] = sum(each.nbytes for each in tensors)
        try:
            self._wait_for_room(request)
            with self._tower_turn(request):
                if request.id not in self._pending:
                    return False
                found = self._found(key)  # another tenant's, meanwhile, where they share rows
                if is_new := found is None:
                    began = time.perf_counter()
                    rows = maker.encode(prepared, changed)
                    found = Rows(rows.clone(), seconds + time.perf_counter() - began)
                    if len(rows) != item.num_rows:
                        raise RuntimeError(
                            f"the tower gives {len(rows)} rows, the prompt has placeholders for {item.num_rows}"
                        )
                self._use(key, found, begun, is_new=is_new)
        finally:
            del self._pixels[number]
        return True

    @contextmanager
    def _tower_turn(self, request: Request) -> Iterator[None]:
        """Have the tower, in the order of arrival: a lock would mostly go to the thread that has just left it."""
        with self._changed:
            self._at_tower.append(request)
            self._changed.wait_for(lambda: self._at_tower[0] is request)
        try:
            yield
        finally:
            with self._changed:
                self._at_tower.popleft()
                self._changed.notify_all()

    def _use(self, key: RowsKey, rows: Rows, begun: _Begun, *, is_new: bool = False) -> None:
        """Give a request rows that are there."""
        with self._changed:
            self.num_encoded += is_new
            self.num_found += not is_new
            begun.lent.append(self._lend(key, rows))
            begun.used.append((key, rows))

    def _found(self, key: RowsKey) -> Rows | None:
        """Rows that are cached, or that requests hold."""
        if (cached := self.cache.find(key)) is not None or (lent := self._lent.get(key)) is None:
            return cached
        return Rows(lent.view_as(lent), self._lent_seconds.get(key, 0.0))

    def _lend(self, key: RowsKey, rows: Rows) -> torch.Tensor:
        """What requests hold of rows: one view for all, whose bytes count as long as one of them has it."""
        if (lent := self._lent.get(key)) is None:
            lent = rows.values.view_as(rows.values)
            self._numbers += 1
            self._live[self._numbers] = lent.nbytes
            weakref.finalize(lent, self._given_back, key, self._numbers)
            self._lent[key], self._lent_seconds[key] = lent, rows.seconds
        return lent

    def _given_back(self, key: RowsKey, number: int) -> None:
        del self._live[number]
        self._lent_seconds.pop(key, None)

    def _held(self) -> int:
        """Bytes of rows that requests hold, and of pixels."""
        return sum(list(self._live.values())) + sum(list(self._pixels.values()))

    def _wait_for_room(self, request: Request) -> None:
        """Wait while requests that have all of their rows, so that they run and end, hold more than they may."""
        while request.id in self._pending and not self._closed:
            begun = {id(rows): rows.nbytes for each in list(self._begun.values()) for rows in each.lent}
            held = self._held()
            if held <= self._bytes or held <= sum(list(self._pixels.values())) + sum(begun.values()):
                return
            time.sleep(_MEMORY_CHECK_SECONDS)
