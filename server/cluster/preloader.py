"""Preloading at a front: replicas have adapters in their arenas before the next request, by burst tolerance."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from ..executors import DaemonPool
from .dispatcher import Dispatcher
from .link import Link
from .mover import mean_adapter_pages
from .placement.arrival_rates import ArrivalRates
from .placement.preloading import burst_tolerance

INTERVAL_SECONDS = 10.0
"""Between two placements: an adapter of a replica that was started again is back after about twice as long."""


class Preloader:
    """Knows what this front is asked for. To be asked now and then, on the dispatcher's loop; a thread counts."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._rates = ArrivalRates()
        self._paths: dict[str, Path] = {}
        self._next = 0.0
        self._pool = DaemonPool("cluster-preload", threads=1, max_waiting=1)
        self._placed: Future[list[list[str]]] | None = None
        self._links: list[Link] = []  # of the placement
        dispatcher.on_arrival = self._note
        dispatcher.on_retire = self._forget

    @property
    def is_placing(self) -> bool:
        return self._placed is not None

    def look(self) -> None:
        """Carry out the placement that has been made since, or have one made where it is time."""
        if self._placed is None:
            if self._clock() >= self._next:
                self._next = self._clock() + INTERVAL_SECONDS
                self._begin(self._rates.at(self._clock()))
        elif self._placed.done():
            placed, self._placed = self._placed, None
            for link, wanted in zip(self._links, placed.result(), strict=True):
                self._bring(link, wanted)

    def _begin(self, rates: dict[str, float]) -> None:
        self._paths = {content: self._paths[content] for content in rates}
        found = [(link, link.stats.num_pages) for link in self._dispatcher.links if link.stats is not None]
        self._links = [link for link, _ in found]
        pages = dict.fromkeys(rates, mean_adapter_pages(self._links))
        self._placed = self._pool.submit(burst_tolerance, rates, pages, [count for _, count in found])

    def _bring(self, link: Link, wanted: list[str]) -> None:
        """Have a replica register adapters, and bring registered adapters into its arena."""
        for content in wanted:
            if content in link.loaded:
                if content not in link.resident:
                    link.send("prefetch", content)
            elif content not in link.failed and content in self._paths:
                link.load(content, self._paths[content])

    def _note(self, content_hash: str, path: Path) -> None:
        self._rates.note(content_hash, self._clock())
        self._paths[content_hash] = path

    def _forget(self, content_hash: str) -> None:
        self._rates.forget(content_hash)
        self._paths.pop(content_hash, None)
