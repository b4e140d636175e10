"""Preloading at a front: replicas have adapters in their arenas before the next request, by burst tolerance."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from .dispatcher import Dispatcher
from .mover import mean_adapter_pages
from .placement import burst_tolerance
from .placement.arrival_rates import ArrivalRates

INTERVAL_SECONDS = 10.0
"""Between two placements: an adapter of a replica that was started again is back after as long."""


class Preloader:
    """Knows what this front is asked for. To be asked now and then, on the dispatcher's loop."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._rates = ArrivalRates()
        self._paths: dict[str, Path] = {}
        self._next = 0.0
        dispatcher.on_arrival = self._note

    def look(self) -> None:
        """Have replicas register the adapters that are to lie there, and bring those that are into their arenas."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + INTERVAL_SECONDS
        rates = self._rates.at(now)
        self._paths = {content: self._paths[content] for content in rates}
        links = [link for link in self._dispatcher.links if link.takes_requests and link.stats is not None]
        pages = mean_adapter_pages(links)
        sizes = [0 if link.stats is None else link.stats.num_pages for link in links]
        for link, wanted in zip(links, burst_tolerance(rates, dict.fromkeys(rates, pages), sizes), strict=True):
            for content in wanted:
                if content not in link.loaded:
                    link.load(content, self._paths[content])
                elif content not in link.resident:
                    link.send("prefetch", content)

    def _note(self, content_hash: str, path: Path) -> None:
        self._rates.note(content_hash, self._clock())
        self._paths[content_hash] = path
