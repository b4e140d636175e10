"""An API server's connection to one replica, which is reopened whenever it ends, until the API server ends.

Tests: tests/server/cluster/test_stay_connected.py
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...core.engine_stats import EngineStats
from ...memory.adapters.adapter_costs import AdapterCost
from ...memory.files.error import LoadFailure
from .address import Address
from .replica import FROM_REPLICA
from .report import Hello, ModelIdentity, Report
from .stream import FrameStream, PlannedEnd, connect, stay_connected
from .wire import Frame, Malformed, WireError

log = logging.getLogger(__name__)

MOST_BEHIND = 16 << 20
"""Unread bytes of a replica that is sent no images: with a frame of the largest size, it is far from
`stream.MAX_UNSENT_BYTES`, at which it counts as stuck."""


class LinkEvents(Protocol):
    """Notifications of a link, on its loop."""

    def on_up(self, link: Link) -> None: ...
    def on_frame(self, link: Link, frame: Frame) -> None: ...
    def on_down(self, link: Link, *, stuck: bool) -> None:
        """The connection has ended, and so have its requests on the replica. stuck: it was silent for too long."""
        ...


class LoadRefusal(NamedTuple):
    """Why a replica could not load an adapter."""

    failure: LoadFailure
    text: str
    retry_at: float = math.inf
    """When the load is tried again, by the dispatcher's clock."""


class Link:
    """An API server's view of one replica; its contents belong to the current connection.

    loaded: content hashes of registered adapters. loading: of adapters that it was sent to load. failed: the reason why
    it could not load an adapter. pinned: None for a content that it keeps resident, or the reason why it can't, as a
    `LoadFailure` and a text; no entry until it replies.
    """

    def __init__(self, name: str, address: Address, secret: bytes, silent_seconds: float) -> None:
        """silent_seconds: a replica that sends nothing for so long counts as dead; it reports once a second."""
        self.name = name
        self._address = address
        self.secret = secret
        self._silent_seconds = silent_seconds
        self._stream: FrameStream | None = None
        self.pid: int | None = None
        """Process id of the replica that was connected last."""
        self.reset()

    def reset(self) -> None:
        """Forget the state of a connection."""
        self.hello: Hello | None = None
        self.report: Report | None = None
        self.spent: Sequence[AdapterCost] = ()
        """What adapters have cost the replica, by content hash."""
        self.draining = False
        self.loaded: set[str] = set()
        self.loading: set[str] = set()
        self.failed: dict[str, LoadRefusal] = {}
        self.pinned: dict[str, tuple[str, str] | None] = {}
        self._pinning: set[str] = set()
        self.resident: frozenset[str] = frozenset()
        self.on_host: frozenset[str] = frozenset()

    @property
    def is_up(self) -> bool:
        return self.hello is not None

    @property
    def is_behind(self) -> bool:
        """True while it has yet to read so much that files of images should wait."""
        return self._stream is not None and self._stream.unsent > MOST_BEHIND

    @property
    def takes_requests(self) -> bool:
        return self.hello is not None and not self.draining

    @property
    def identity(self) -> ModelIdentity | None:
        return None if self.hello is None else self.hello.identity

    @property
    def stats(self) -> EngineStats | None:
        return None if self.report is None else self.report.stats

    def send(self, kind: str, *fields: Any) -> None:
        """Queue a frame; frames to a dead replica are lost, and `on_down` follows."""
        if self._stream is not None:
            try:
                self._stream.send(kind, *fields)
            except WireError as error:
                log.warning("replica %s: %s", self.name, error)
                self._stream.close()

    def load(self, content_hash: str, path: Path) -> None:
        """Have the replica register an adapter, unless it has, or is doing so."""
        if self.is_up and content_hash not in self.loaded and content_hash not in self.loading:
            self.loading.add(content_hash)
            self.failed.pop(content_hash, None)
            self.send("load", content_hash, str(path))

    def pin(self, content_hash: str) -> None:
        """Have the replica keep a loaded adapter resident, unless it does, can't, or was told to."""
        if content_hash in self.loaded and content_hash not in self.pinned and content_hash not in self._pinning:
            self._pinning.add(content_hash)
            self.send("pin", content_hash, True)

    def unpin(self, content_hash: str) -> None:
        self._pinning.discard(content_hash)
        self.pinned.pop(content_hash, None)
        self.send("pin", content_hash, False)

    def note_pinned(self, content_hash: str, failure: str | None, text: str | None) -> None:
        """The replica has replied to `pin`, which may have been withdrawn."""
        if content_hash in self._pinning:
            self._pinning.discard(content_hash)
            self.pinned[content_hash] = None if failure is None else (failure, text or "no reason given")

    def forget(self, content_hash: str) -> None:
        """Have the replica unregister an adapter."""
        self.failed.pop(content_hash, None)
        if content_hash in self.loaded:
            self.loaded.discard(content_hash)
            self.send("forget", content_hash)

    def note_report(self, report: Report) -> None:
        self.report = report
        if report.spent is not None:
            self.spent = report.spent
        self.draining = report.draining
        self.resident = frozenset(one for one, tier in report.tiers.items() if tier in ("device", "loading"))
        self.on_host = frozenset(one for one, tier in report.tiers.items() if tier == "host") | self.resident

    async def run(self, events: LinkEvents) -> None:
        """Keep the connection open, until cancelled."""
        await stay_connected(
            f"replica {self.name}",
            lambda: connect(self._address, self.secret, FROM_REPLICA),
            partial(self._follow, events),
        )

    async def _follow(self, events: LinkEvents, stream: FrameStream) -> None:
        self._stream, stuck = stream, False
        try:
            await self._talk(stream, events)
            if self.draining:
                raise PlannedEnd("it has ended, as requested")
        except TimeoutError:
            stuck = True
            raise WireError(f"it was silent for {self._silent_seconds:g} s") from None
        finally:
            self._stream = None
            if self.is_up:
                self.hello = None  # it takes no requests, but the last report's counts still add up
                events.on_down(self, stuck=stuck)
            self.reset()

    async def _talk(self, stream: FrameStream, events: LinkEvents) -> None:
        clock, silent = asyncio.get_running_loop().time, self._silent_seconds
        async with asyncio.timeout(silent) as limit:
            until = clock()
            while (frame := await stream.read()) is not None:
                if (now := clock()) > until:  # not for each frame, which would be expensive
                    until = now + silent / 16
                    limit.reschedule(until + silent)
                try:
                    self._take(frame, events)
                except (TypeError, ValueError) as error:
                    raise Malformed(f"a frame {frame.kind} can't be read: {error!r}") from None

    def _take(self, frame: Frame, events: LinkEvents) -> None:
        if frame.kind == "hello":
            (data,) = frame.fields
            self.hello = Hello.from_wire(data)
            self.pid = self.hello.pid
            events.on_up(self)
            return
        if self.hello is None:
            raise Malformed(f"a replica began with {frame.kind}")
        if frame.kind == "stats":
            (data,) = frame.fields
            self.note_report(Report.from_wire(data))
        events.on_frame(self, frame)
