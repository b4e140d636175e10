"""Migration as a controller: the planners of `server.cluster.placement`, over the replicas of a simulation."""

from __future__ import annotations

import math
from dataclasses import replace

from ...core.costs.models import CostModel
from ...server.cluster.placement.migration import AnswerSeconds, Migration, Movable
from ...server.cluster.placement.plan import plan_moves
from ...server.cluster.placement.settings import MigrationSettings
from .adapters import SimAdapters
from .cluster import Cluster, Event, Happened
from .replica import Held


class Migrating:
    """Has requests go on at other replicas by a planner; the planner's own time is not simulated."""

    def __init__(self, planner: str, settings: MigrationSettings, costs: CostModel, adapters: SimAdapters) -> None:
        """planner: a name of `PLANNERS`. adapters: the catalogue of the replicas."""
        self._planner = planner
        self._settings = replace(settings, solve_seconds=math.inf)  # or plans would differ from run to run
        self._costs = costs
        self._adapters = adapters
        self._migration: Migration | None = None
        self._answers = AnswerSeconds(settings.answer_seconds)

    def __call__(self, event: Event, cluster: Cluster) -> None:
        now = event.time
        if self._migration is None:
            catalogue = self._adapters
            self._migration = Migration(
                self._settings,
                lambda name: catalogue.layout(name).num_pages,
                lambda name: self._costs.link.seconds(catalogue.manifest(name).file_size),
                cluster.replicas[0].block_tokens,
            )
            self._migration.is_due(now)
            cluster.tick(self._settings.interval_seconds)
        if event.kind is Happened.ENDED and event.replica is not None:
            for request in cluster.replicas[event.replica].ended:
                self._answers.note(request.adapter, now - request.arrival)
        elif event.kind is Happened.TICK and self._migration.is_due(now):
            self._move(self._migration, cluster, now)
            cluster.tick(self._settings.interval_seconds)

    def _move(self, migration: Migration, cluster: Cluster, now: float) -> None:
        replicas = cluster.serving
        requests = [self._movable(index, each) for index, replica in enumerate(replicas) for each in replica.held()]
        requests.sort(key=lambda request: int(request.id))
        task = migration.task([replica.look(now) for replica in replicas], requests, now)
        if task is None:
            return
        moves = task.moves(plan_moves(task.problem, self._planner, self._settings))
        migration.note(moves, now)
        for move in moves:
            cluster.migrate(int(move.id), replicas[move.source].index, replicas[move.target].index)

    def _movable(self, index: int, held: Held) -> Movable:
        request, tokens, has_kv = held
        prefill = self._costs.migrate_seconds(tokens, request.rank or 0) if has_kv else 0.0
        run = self._answers.of(request.adapter)
        return Movable(str(request.id), index, request.adapter, tokens, has_kv, run, prefill)
