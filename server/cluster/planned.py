"""Plans made by a thread next to an API server's loop: migrations of requests, and preloading of adapters."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from ..executors import DaemonPool
from .dispatcher import Dispatcher
from .link import Link
from .placement.migration import AnswerSeconds, Migration, Movable, Task
from .placement.plan import PlacementPlan, plan_moves
from .placement.preloading import ArrivalRates, burst_tolerance
from .placement.settings import MigrationSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

INTERVAL_SECONDS = 10.0
"""Seconds between two placements: adapters of a restarted replica are back after about twice as long."""


class PlannedChanges(ABC, Generic[T]):
    """Makes one plan at a time. Call `look` periodically, on the dispatcher's loop."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._pool = DaemonPool("cluster-plan", threads=1, max_waiting=1)
        self._plan: Future[T] | None = None
        self._links: list[Link] = []
        """Replicas of the plan."""

    def look(self) -> None:
        """Carry out the plan that has been completed, or start one if it is due."""
        if self._plan is None:
            self._plan = self._begin(self._clock())
        elif self._plan.done():
            plan, self._plan = self._plan, None
            self._carry_out(plan.result())

    @abstractmethod
    def _begin(self, now: float) -> Future[T] | None:
        """Make a plan on the pool's thread; None if none is needed now."""

    @abstractmethod
    def _carry_out(self, plan: T) -> None: ...

    def _mean_adapter_pages(self) -> int:
        """Mean pages of an adapter, over all resident adapters that replicas report; 1 without any."""
        pages = sum(link.stats.num_adapter_pages for link in self._links if link.stats is not None)
        return max(1, round(pages / max(1, sum(len(link.resident) for link in self._links))))


class Mover(PlannedChanges[PlacementPlan]):
    """Migration: requests of this API server move to other replicas if the load is uneven."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        planner: str,
        settings: MigrationSettings,
        soon: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """planner: a name of `PLANNERS`. soon: has the dispatcher's loop call a function, from any thread."""
        super().__init__(dispatcher, clock)
        self._planner = planner
        self._settings = settings
        self._soon = soon
        self._migration = Migration(settings, lambda content_hash: self._mean_adapter_pages())
        self._answers = AnswerSeconds(settings.answer_seconds)
        self._task: Task | None = None
        dispatcher.on_end = self._answers.note

    def _begin(self, now: float) -> Future[PlacementPlan] | None:
        if not self._migration.is_due(now):
            return None
        dispatcher = self._dispatcher
        self._links = [link for link in dispatcher.links if link.takes_requests]
        number = {link.name: index for index, link in enumerate(self._links)}
        requests = [
            Movable(
                request.id,
                replica=number[link.name],
                adapter=request.content_hash,
                tokens=len(request.record["tokens"]),
                has_kv=request.is_started,
                run_seconds=self._answers.of(request.content_hash),
                targets=frozenset(number[target.name] for target in targets),
            )
            for request, link, targets in dispatcher.placed()
            if link.name in number
        ]
        states = [dispatcher.fleet.state_of(link) for link in self._links]
        self._task = self._migration.task(states, requests, now)
        if self._task is None:
            return None
        plan = self._pool.submit(plan_moves, self._task.problem, self._planner, self._settings)
        plan.add_done_callback(lambda _: self._soon(self.look))  # by the next look most requests might have ended
        return plan

    def _carry_out(self, plan: PlacementPlan) -> None:
        moves = [] if self._task is None else self._task.moves(plan)
        moved = [
            move
            for move in moves
            if self._dispatcher.move_to(move.id, self._links[move.source], self._links[move.target])
        ]
        self._migration.note(moved, self._clock())
        if moved:
            regret = "" if plan.regret is None else f", at most {plan.regret:.1%} above the best plan"
            log.info(
                "%d requests move: %.3g s of load instead of %.3g%s", len(moved), plan.objective, plan.before, regret
            )


class Preloader(PlannedChanges[list[list[str]]]):
    """Preloading: replicas load adapters before the next request, by burst tolerance.

    It only knows the requests of this API server.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(dispatcher, clock)
        self._rates = ArrivalRates()
        self._paths: dict[str, Path] = {}
        self._next = 0.0
        dispatcher.on_arrival = self._note
        dispatcher.on_retire = self._forget

    def _begin(self, now: float) -> Future[list[list[str]]] | None:
        if now < self._next:
            return None
        self._next, rates = now + INTERVAL_SECONDS, self._rates.at(now)
        self._paths = {content: self._paths[content] for content in rates}
        found = [(link, link.stats.num_pages) for link in self._dispatcher.links if link.stats is not None]
        self._links = [link for link, _ in found]
        pages = dict.fromkeys(rates, self._mean_adapter_pages())
        return self._pool.submit(burst_tolerance, rates, pages, [count for _, count in found])

    def _carry_out(self, plan: list[list[str]]) -> None:
        """Have replicas register adapters, and make registered adapters resident."""
        for link, wanted in zip(self._links, plan, strict=True):
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
