"""Greedy co-migration: requests leave the busiest replica one by one, each with its adapter where that is missing."""

from __future__ import annotations

import numpy as np

from .problem import Problem


def greedy(problem: Problem) -> np.ndarray:
    """Return a place that is no worse than the requests' home.

    Each turn moves, from the busiest replica, the request for which the busier one of source and target is the least
    busy afterwards; it ends when that would be no less than before. A request moves once. Of all places on the way the
    best one is returned, as the last moves may not have paid.
    """
    place, best = problem.home.copy(), problem.home
    least = problem.objective(best)
    limits, rows = problem.limits, np.arange(problem.num_replicas)
    can_move = problem.allowed.sum(axis=1) > 1
    users = np.zeros_like(problem.resident, dtype=np.int64)  # [a, m]
    np.add.at(users, (problem.adapter, place), 1)
    pages, seconds = problem.pages_at(place), problem.seconds(place)
    while True:
        source = int(seconds.argmax())
        found = np.flatnonzero((place == source) & can_move)
        if not len(found):
            return best
        left = _without(problem, found, source, users, pages, seconds)
        more_pages, more_seconds = _with(problem, found, users)
        after = pages + more_pages
        excess = np.maximum(after - problem.num_pages, 0) - np.maximum(pages - problem.num_pages, 0)
        there = seconds + more_seconds + problem.page_seconds * excess
        busier = np.maximum(there, left[:, None])
        busier[~problem.allowed[found] | (after > limits) | (rows == source)] = np.inf
        at, target = divmod(int(busier.argmin()), problem.num_replicas)
        if not busier[at, target] < seconds[source]:
            return best
        index = int(found[at])
        place[index] = target
        can_move[index] = False
        users[problem.adapter[index], source] -= 1
        users[problem.adapter[index], target] += 1
        pages, seconds = problem.pages_at(place), problem.seconds(place)
        if (objective := problem.objective(place)) < least:
            best, least = place.copy(), objective


def _without(
    problem: Problem, found: np.ndarray, source: int, users: np.ndarray, pages: np.ndarray, seconds: np.ndarray
) -> np.ndarray:
    """float64 [f]: seconds of the source without each of its requests."""
    adapter = problem.adapter[found]
    last = (users[adapter, source] == 1) & ~problem.resident[adapter, source]
    freed = problem.pages[found] + np.where(last, problem.adapter_pages[adapter], 0)
    excess = max(0, pages[source] - problem.num_pages[source])
    saved = problem.run_seconds[found] + np.where(last, problem.load_seconds[adapter], 0.0)
    return seconds[source] - saved - problem.page_seconds * np.minimum(freed, excess)


def _with(problem: Problem, found: np.ndarray, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64, float64 [f, m]: pages and seconds that each request adds to a replica."""
    adapter = problem.adapter[found]
    missing = ~problem.resident[adapter] & (users[adapter] == 0)
    pages = problem.pages[found][:, None] + np.where(missing, problem.adapter_pages[adapter][:, None], 0)
    seconds = (problem.run_seconds + problem.move_seconds)[found][:, None]
    return pages, seconds + np.where(missing, problem.load_seconds[adapter][:, None], 0.0)
