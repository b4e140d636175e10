"""The event stream of the operator's page: one picture per second for all open pages, none while no page is open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from statistics import quantiles
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..api.sse import EventStream
from ..engine.backend import Backend
from ..engine.metrics import Metrics
from ..errors import ApiError, EngineUnavailable, PrivatePaths
from ..executors import DaemonPool
from ..http.gate import Gate
from ..http.statuses import Statuses
from ..version import VERSION
from .frames import Frames, event
from .usage_rows import usage_tables

log = logging.getLogger(__name__)

MAX_WATCHERS = 16

TICK_SECONDS = 1.0
"""Seconds between two events."""

REST = 9
"""After a tick, rest for at least so many times its duration, whatever `TICK_SECONDS` says."""

MAX_BEHIND = 4
"""Events that a watcher may lag behind; a slower reader is dropped."""

PICTURE_SECONDS = 2.0
"""Seconds that a tick waits for the engine before it reports that the engine does not respond."""

FIRST_SECONDS = 10.0
"""Seconds covered by the percentiles of the time to the first token."""

MAX_FIRST = 4096
"""Most times that the percentiles use, the latest ones."""

POINTS = 300
"""Points of the charts that a new watcher gets."""


class Watcher:
    """A browser with the page open."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BEHIND)
        self.is_new = True
        """True until all of its events were sent."""
        self.is_dropped = False

    def send(self, data: bytes) -> None:
        """Queue an event; a watcher that lags too far behind is dropped."""
        try:
            self.events.put_nowait(data)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """End its stream; unsent events are dropped."""
        self.is_dropped = True
        while not self.events.empty():
            self.events.get_nowait()
        self.events.put_nowait(None)

    async def read(self) -> AsyncIterator[bytes]:
        while (data := await self.events.get()) is not None:
            yield data


class Watchers:
    """Watchers of one server; used on its event loop."""

    def __init__(
        self,
        worker: Backend,
        metrics: Metrics,
        pool: DaemonPool,
        gate: Gate,
        base: str,
        statuses: Statuses,
        private: PrivatePaths,
    ) -> None:
        """statuses: counts of responses. private: hides paths of this machine."""
        self._worker = worker
        self.metrics = metrics
        self._pool = pool
        self._gate = gate
        self._base = base
        self._statuses = statuses
        self._frames = Frames(private.hide, partial(usage_tables, metrics.usage, gate.tokens.left))
        self.points: deque[tuple[Any, ...]] = deque(maxlen=POINTS)
        # first tokens: time of the tick that saw them, seconds
        self._first: deque[tuple[float, float]] = deque(maxlen=MAX_FIRST)
        self._counted = 0, 0.0  # tokens generated, and when
        self._failed = 0, 0  # errors and refusals at the latest point
        self._ticking: asyncio.Task[None] | None = None
        self._remembering: asyncio.Task[None] | None = None
        self.watchers: set[Watcher] = set()
        self.num_ticks = 0

    @property
    def is_ticking(self) -> bool:
        return self._ticking is not None

    def start(self) -> None:
        """Begin to keep points for the charts of pages that are opened later."""
        self.metrics.first_tokens = []
        self._counted = self._worker.stats.num_generated_tokens, time.monotonic()
        self._remembering = asyncio.create_task(self._remember())

    def stop(self) -> None:
        if self._remembering is not None:
            self._remembering.cancel()

    async def _remember(self) -> None:
        """Take a point per second while no page is open: a few numbers, without asking the engine."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if not self.is_ticking:
                self._point()

    async def events(self, _: Request) -> Response:
        """Send everything at once, then the changes every second."""
        if self._gate.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)
        if len(self.watchers) >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} pages are open, which is the maximum; close one"
            raise ApiError(503, message, code="overloaded", retry_after=10)
        watcher = Watcher()
        self.watchers.add(watcher)
        if not self.is_ticking:
            self._ticking = asyncio.create_task(self._tick_on())
        return EventStream(watcher.read(), lambda: self.watchers.discard(watcher), {})

    async def _tick_on(self) -> None:
        try:
            while self.watchers:
                began = time.monotonic()
                await self._tick()
                took = time.monotonic() - began
                await asyncio.sleep(max(TICK_SECONDS - took, REST * took))
        except Exception:
            log.exception("the operator's page can't be shown")
        finally:
            for watcher in self.watchers:
                watcher.end()
            self._ticking = None
            self._frames.forget()

    async def _tick(self) -> None:
        watchers = [one for one in self.watchers if not one.is_dropped]
        if self._gate.draining:
            for watcher in watchers:
                watcher.end()
            return
        self.num_ticks += 1
        facts = {
            "point": self._point(),
            "trouble": self._worker.trouble,
            "watchers": len(watchers),
            "failed": [self._statuses.errors, self._statuses.refused],
        }
        whole = None
        if any(one.is_new for one in watchers):
            whole = {"version": VERSION, "model": self._base, "points": [*self.points], "tick": TICK_SECONDS}
        try:
            picture = await asyncio.wait_for(asyncio.wrap_future(self._worker.picture()), PICTURE_SECONDS)
        except (TimeoutError, EngineUnavailable) as error:
            trouble = self._worker.trouble or str(error) or "the engine does not respond"
            for watcher in watchers:
                watcher.send(event("trouble", {"trouble": trouble}))
            return
        data, everything = await self._pool.run(self._frames.encode, picture, self._worker.stats, facts, whole)
        for watcher in watchers:
            watcher.send(everything if watcher.is_new else data)
            watcher.is_new = False

    def _point(self) -> tuple[Any, ...]:
        """Time, tokens/s, median and 95th percentile of the time to the first token, running and waiting requests, and
        errors and refusals since the previous point.
        """
        stats, now = self._worker.stats, time.monotonic()
        tokens, then = self._counted
        self._counted = stats.num_generated_tokens, now
        rate = max(0, stats.num_generated_tokens - tokens) / (now - then) if now > then else 0.0
        self._first.extend((now, seconds) for seconds in self.metrics.first_tokens or ())
        self.metrics.first_tokens = []
        while self._first and self._first[0][0] < now - FIRST_SECONDS:
            self._first.popleft()
        first = _percentiles([seconds for _, seconds in self._first])
        failed, self._failed = self._failed, (self._statuses.errors, self._statuses.refused)
        since = (now_ - before for now_, before in zip(self._failed, failed, strict=True))
        point = (round(time.time(), 1), round(rate, 1), *first, stats.num_running, stats.num_waiting, *since)
        self.points.append(point)
        return point


def _percentiles(seconds: list[float]) -> tuple[float | None, float | None]:
    """Median and 95th percentile; None without any."""
    if not seconds:
        return None, None
    cuts = quantiles([*seconds, seconds[0]] if len(seconds) == 1 else seconds, n=20, method="inclusive")
    return round(cuts[9], 4), round(cuts[18], 4)
