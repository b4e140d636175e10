"""Images that requests name by URLs: fetched from domains that the operator allows, within bounds of time and size.

A name is resolved once and every address of it is checked; the connection goes to that very address, without a proxy,
and nothing is followed elsewhere. See `stores/guarded_http.py`.

Tests: tests/server/api/images/test_image_fetch.py
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import httpx

from ....core.media.images import BadImage, check_size
from ...executors import DaemonPool
from ...stores.allowed import Allowed
from ...stores.deadline import Deadline
from ...stores.errors import StoreAway, StoreRefused
from ...stores.guarded_http import guarded_client

SECONDS = 10.0
"""Until an image must have come, from the moment that its name is resolved."""

THREADS = 32
OF_A_TENANT = 4
"""Images that are fetched for a tenant at once: servers that answer slowly hold up nobody else's."""

_CHUNK_BYTES = 64 << 10
_INSTEAD = "send the image itself as a data URL"


@dataclass(slots=True)
class Room:
    """Bytes that a request's fetched images may take: no more than a body that has them as data URLs."""

    most: int
    _taken: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, num_bytes: int) -> None:
        with self._lock:
            self._taken += num_bytes
            if self._taken > self.most:
                reason = f"is one too many: at most {self.most} bytes are fetched for a request (max_body_bytes)"
                raise BadImage(f"{reason}; send fewer, or smaller ones")


@dataclass(slots=True)
class ImageFetcher:
    """Fetches images from allowed domains."""

    domains: Collection[str]
    """As of `allowed_media_domains`; none: nothing is fetched."""

    seconds: float = SECONDS
    _allowed: Allowed = field(init=False)
    _threads: DaemonPool = field(default_factory=lambda: DaemonPool("image-fetches", THREADS))
    _turns: WeakValueDictionary[str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        self._allowed = Allowed(self.domains)

    async def fetched(self, tenant: str, url: str, room: Room) -> bytes:
        """The bytes at a URL. Raises BadImage."""
        if not self.domains:
            raise BadImage(f"is at a URL, and this server fetches none (allowed_media_domains); {_INSTEAD}")
        turn = self._turns.setdefault(tenant, asyncio.Semaphore(OF_A_TENANT))
        await turn.acquire()
        fetch = asyncio.ensure_future(self._threads.run(self._fetch, url, room))

        def end(done: asyncio.Future[bytes]) -> None:
            turn.release()
            if not done.cancelled():
                done.exception()  # seen, where the client has left

        fetch.add_done_callback(end)
        return await asyncio.shield(fetch)  # the turn lasts as long as the thread, not as long as the client

    def _fetch(self, url: str, room: Room) -> bytes:
        deadline = Deadline(self.seconds)
        try:
            with (
                guarded_client(self._allowed, deadline, redirects=0) as client,
                client.stream("GET", url) as response,
            ):
                return _body(response, room)
        except StoreRefused:
            reason = "is on a host, or at an address, that this server does not fetch from (allowed_media_domains)"
            raise BadImage(f"{reason}; {_INSTEAD}") from None
        except (StoreAway, httpx.TimeoutException):
            raise BadImage(f"has not come: its host has no address, or took over {self.seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL):
            raise BadImage("has not come: its host does not answer, or breaks off") from None


def _body(response: httpx.Response, room: Room) -> bytes:
    if response.is_redirect:
        raise BadImage(f"is elsewhere ({response.status_code}), and redirects are not followed; give its own URL")
    if response.status_code != 200:
        raise BadImage(f"has not come: its host answers {response.status_code}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise BadImage("has not come: its host compresses it without being asked")
    if (length := response.headers.get("content-length", "")).isdecimal():
        check_size(int(length))
    data = bytearray()
    for chunk in response.iter_raw(_CHUNK_BYTES):
        room.take(len(chunk))
        data += chunk
        check_size(len(data))
    if not data:
        raise BadImage("is empty")
    return bytes(data)
