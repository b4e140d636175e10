"""Controllers of a simulated cluster: migration, and scaling of replicas."""

from __future__ import annotations

import math
from dataclasses import replace

from ...core.costs.models import CostModel
from ...server.cluster.placement.migration import AnswerSeconds, Migration, Movable
from ...server.cluster.placement.plan import plan_moves
from ...server.cluster.placement.settings import MigrationSettings
from ...server.cluster.router.scale import STEADY_SECONDS, SteadyHint, scale_hint
from .adapters import SimAdapters
from .cluster import Cluster, Event, Happened
from .replica import Held, Phase


class Migrating:
    """Moves requests to other replicas by a planner; the planner's own time is not simulated."""

    def __init__(self, planner: str, settings: MigrationSettings, costs: CostModel, adapters: SimAdapters) -> None:
        """planner: a name of `PLANNERS`. adapters: the catalogue of the replicas."""
        self._planner = planner
        self._settings = replace(settings, solve_seconds=math.inf)  # otherwise plans would differ from run to run
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
        return Movable(
            str(request.id),
            index,
            adapter=request.adapter,
            tokens=tokens,
            has_kv=has_kv,
            run_seconds=run,
            prefill_seconds=prefill,
        )


LOOK_SECONDS = 1.0


class Scaling:
    """A controller that follows scale hints. A removed replica finishes its requests, which API servers would have
    moved.

    replica_seconds: total time of the replicas, including booting ones, up to the last look.
    """

    def __init__(self, least: int, most: int, boot_seconds: float, steady_seconds: float = STEADY_SECONDS) -> None:
        """least, most: replicas. boot_seconds: until a new replica serves."""
        self.replica_seconds = 0.0
        self._least, self._most = least, most
        self._boot_seconds = boot_seconds
        self._hint = SteadyHint(steady_seconds)
        self._looked: float | None = None

    def __call__(self, event: Event, cluster: Cluster) -> None:
        now = event.time
        if self._looked is None:
            self._looked = now
            cluster.tick(LOOK_SECONDS)
        if event.kind is not Happened.TICK or now < self._looked + LOOK_SECONDS:  # ticks may be another controller's
            return
        there = [replica for replica in cluster.replicas if replica.phase is not Phase.GONE]
        self.replica_seconds += len(there) * (now - self._looked)
        self._looked = now
        self._follow(now, cluster, is_whole=len(there) == len(cluster.serving))
        cluster.tick(LOOK_SECONDS)

    def _follow(self, now: float, cluster: Cluster, *, is_whole: bool) -> None:
        """is_whole: no replica is being added or removed."""
        serving = cluster.serving
        states = [replica.look(now) for replica in serving]
        self._hint.update(scale_hint(states, cluster.num_held) if is_whole else None, now)
        wanted = min(max(len(serving) + self._hint.value, self._least), self._most)
        if wanted == len(serving) or not is_whole:
            return
        if wanted > len(serving):
            cluster.boot(self._boot_seconds)
        else:
            cluster.drain(serving[-1].index)
        self._hint.update(None, now)
