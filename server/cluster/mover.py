"""Migration at a front: its requests go on at other replicas, by plans that a thread makes of what replicas report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from ..executors import DaemonPool
from .dispatcher import Dispatcher
from .link import Link
from .placement.answer_seconds import AnswerSeconds
from .placement.migration import Migration, Movable, Task
from .placement.plan import Plan, plan_moves
from .placement.settings import MigrationSettings

log = logging.getLogger(__name__)


class Mover:
    """Moves only requests of this front. To be asked now and then, on the dispatcher's loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        planner: str,
        settings: MigrationSettings,
        soon: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """planner: a name of `PLANNERS`. soon: has the dispatcher's loop call a function, from any thread."""
        self._dispatcher = dispatcher
        self._planner = planner
        self._settings = settings
        self._soon = soon
        self._clock = clock
        self._migration = Migration(settings, self._adapter_pages)
        self._answers = AnswerSeconds(settings.answer_seconds)
        self._pool = DaemonPool("cluster-plan", threads=1, max_waiting=1)
        self._planned: Future[Plan] | None = None
        self._task: Task | None = None
        self._links: list[Link] = []  # of the task
        dispatcher.on_end = self._answers.note

    @property
    def is_planning(self) -> bool:
        return self._planned is not None

    def look(self) -> None:
        """Move what a plan says that has been made since, or have one made where it is time and the load is uneven."""
        if self._planned is None:
            if self._migration.is_due(self._clock()):
                self._begin()
        elif self._planned.done():
            planned, self._planned = self._planned, None
            self._carry_out(planned.result())

    def _begin(self) -> None:
        dispatcher = self._dispatcher
        self._links = [link for link in dispatcher.links if link.takes_requests]
        number = {link.name: index for index, link in enumerate(self._links)}
        requests = [
            Movable(
                request.id, number[link.name], request.content_hash, len(request.record["tokens"]), request.is_started,
                self._answers.of(request.content_hash),
                targets=frozenset(number[target.name] for target in targets),
            )
            for request, link, targets in dispatcher.placed() if link.name in number
        ]  # fmt: skip
        states = [dispatcher.fleet.state_of(link) for link in self._links]
        self._task = self._migration.task(states, requests, self._clock())
        if self._task is not None:
            self._planned = self._pool.submit(plan_moves, self._task.problem, self._planner, self._settings)
            # at the next look most of the requests might have ended
            self._planned.add_done_callback(lambda _: self._soon(self.look))

    def _carry_out(self, plan: Plan) -> None:
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

    def _adapter_pages(self, content_hash: str) -> int:
        return mean_adapter_pages(self._links)


def mean_adapter_pages(links: list[Link]) -> int:
    """Mean pages of an adapter, over all adapters that replicas report in their arenas; 1 where there are none."""
    pages = sum(link.stats.num_adapter_pages for link in links if link.stats is not None)
    return max(1, round(pages / max(1, sum(len(link.resident) for link in links))))
