"""Triggers of migration: when to plan, and for which requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import NamedTuple

import numpy as np

from ..router.replicas import ReplicaState
from .plan import PlacementPlan
from .problem import Problem
from .settings import MigrationSettings

WEIGHT = 0.1
"""Weight of a finished completion in the mean, compared with the earlier ones."""


class AnswerSeconds:
    """Exponential means of completion lengths. default: for adapters without a finished completion."""

    def __init__(self, default: float) -> None:
        self._default = default
        self._means: dict[str | None, float] = {}

    def note(self, adapter: str | None, seconds: float) -> None:
        mean = self._means.get(adapter, seconds)
        self._means[adapter] = mean + WEIGHT * (seconds - mean)

    def of(self, adapter: str | None) -> float:
        return self._means.get(adapter, self._default)


class Movable(NamedTuple):
    """A request that a plan may move."""

    id: str
    """Its key, of any type."""
    replica: int
    """Index of its replica."""
    adapter: str | None
    tokens: int
    """Tokens of the prompt and of the completion so far."""
    has_kv: bool
    """Its prompt has been computed."""
    run_seconds: float
    """Mean tokens of a completion with its adapter."""
    prefill_seconds: float = 0.0
    """Seconds to compute its tokens elsewhere; 0 if unknown, or if nothing has been computed."""
    targets: frozenset[int] | None = None
    """Indices of replicas that may run it; None: all."""


class Move(NamedTuple):
    """A request moves to another replica, which must load its adapter if it is missing there."""

    id: str
    source: int
    target: int
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Task:
    """A problem, and the meaning of its indices."""

    problem: Problem
    requests: list[Movable]
    replicas: list[int]
    """Indices of the replicas that it covers."""

    def moves(self, plan: PlacementPlan) -> list[Move]:
        where = zip(self.requests, self.problem.home.tolist(), plan.place.tolist(), strict=True)
        return [
            Move(each.id, self.replicas[home], self.replicas[place], each.adapter)
            for each, home, place in where
            if home != place
        ]


class Migration:
    """Decides periodically for which requests to make a plan: only while the load is far from even."""

    def __init__(
        self,
        settings: MigrationSettings,
        adapter_pages: Callable[[str], int] = lambda name: 1,
        load_seconds: Callable[[str], float] = lambda name: 0.0,
        block_tokens: int = 16,
    ) -> None:
        """adapter_pages, load_seconds: of an adapter by its name. block_tokens: of a KV page."""
        self.settings = settings
        self._adapter_pages = adapter_pages
        self._load_seconds = load_seconds
        self._block_tokens = block_tokens
        self._next = 0.0
        self._held: dict[str, float] = {}  # requests that moved, and the time until which they stay

    def is_due(self, now: float) -> bool:
        """True once per `interval_seconds`."""
        if now < self._next:
            return False
        self._next = now + self.settings.interval_seconds
        return True

    def note(self, moves: Sequence[Move], now: float) -> None:
        """Requests have moved: they stay for `hold_seconds`."""
        self._held = {request_id: until for request_id, until in self._held.items() if until > now}
        self._held |= {move.id: now + self.settings.hold_seconds for move in moves}

    def task(self, replicas: Sequence[ReplicaState], requests: Sequence[Movable], now: float) -> Task | None:
        """A problem with the most and the least loaded replicas; None while the load is even, or nothing may move.

        requests: in order of arrival. The replicas' other requests belong to other API servers, and stay.
        """
        chosen = self._chosen(replicas)
        at = {index: number for number, index in enumerate(chosen)}
        found = [each for each in requests if each.replica in at]
        if not found:
            return None
        names = dict(zip(dict.fromkeys((None, *(each.adapter for each in found))), count()))
        home = np.array([at[each.replica] for each in found])
        allowed = np.array([self._may_go(each, chosen, now) for each in found])
        allowed[np.arange(len(found)), home] = True
        if allowed.sum() == len(found):
            return None
        states = [replicas[index] for index in chosen]
        pages = np.array([ceil(each.tokens / self._block_tokens) for each in found])
        adapters = [name for name in names if name is not None]
        own = np.bincount(home, minlength=len(chosen))
        others = np.maximum(np.array([state.num_requests for state in states]) - own, 0)
        mean = float(np.mean([each.run_seconds for each in found]))
        settings = self.settings
        resident = [[name in state.resident for state in states] for name in adapters]
        problem = Problem(
            home=home,
            adapter=np.array([names[each.adapter] for each in found]),
            run_seconds=np.array([each.run_seconds for each in found]),
            move_seconds=np.array([settings.move_seconds + each.prefill_seconds for each in found]),
            pages=pages,
            allowed=allowed,
            busy_seconds=others * mean,
            num_pages=self._room(states, found, home),
            num_slots=np.maximum(np.array([state.max_num_seqs for state in states]) - others, 0),
            resident=np.array([[True] * len(states), *resident]),
            load_seconds=np.array([0.0, *map(self._load_seconds, adapters)]),
            adapter_pages=np.array([0, *map(self._adapter_pages, adapters)]),
            page_seconds=settings.page_seconds,
        )
        return Task(problem, found, chosen)

    def _chosen(self, replicas: Sequence[ReplicaState]) -> list[int]:
        """Indices of the most and the least loaded replicas: by KV if one is full, else by requests; empty if even."""
        settings = self.settings
        if len(replicas) < 2:
            return []
        kv = [(one.kv_tokens + one.pending_tokens) / max(1, one.kv_tokens + one.free_tokens) for one in replicas]
        count = [one.num_requests for one in replicas]
        if max(kv) >= settings.kv_share > min(kv):
            load: Sequence[float] = kv
        elif max(count) - sum(count) / len(count) >= settings.excess_requests:
            load = count
        else:
            return []
        order = sorted(range(len(replicas)), key=load.__getitem__)
        most = settings.most_replicas
        return sorted({*order[:most], *order[-most:]})

    def _may_go(self, request: Movable, chosen: Sequence[int], now: float) -> list[bool]:
        if self._held.get(request.id, now) > now:
            return [False] * len(chosen)
        return [request.targets is None or index in request.targets for index in chosen]

    def _room(self, states: Sequence[ReplicaState], found: Sequence[Movable], home: np.ndarray) -> np.ndarray:
        """int64 [m]: pages for the requests' KV and for adapters that come, up to `kv_share` of the replica's."""
        own = np.bincount(home, [each.tokens if each.has_kv else 0 for each in found], len(states))
        kv, free = (np.array([getattr(one, name) for one in states]) for name in ("kv_tokens", "free_tokens"))
        room = self.settings.kv_share * (kv + free) - np.maximum(kv - own, 0)
        return np.maximum(room, 0).astype(np.int64) // self._block_tokens
