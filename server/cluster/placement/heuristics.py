"""Planners without a solver: greedy co-migration (ours), and moving the newest request (Punica, §5.3)."""

from __future__ import annotations

import numpy as np

from .problem import EFFORT_WEIGHT, Problem

LEAST_GAIN = 1e-6
"""Seconds by which a move must make a replica less busy; more than rounding errors."""


def greedy(problem: Problem) -> np.ndarray:
    """Return an assignment that is no worse than the requests' home.

    Each iteration looks at the busiest replica. For each of its requests it finds the target that would be least busy.
    It then moves the request for which the busier of source and target is least busy. It ends when that would not be an
    improvement. The best of all visited assignments is returned, because the last moves may not have paid.
    """
    place, limits = problem.home.copy(), problem.limits
    users = np.zeros_like(problem.resident, dtype=np.int64)  # [a, m]
    np.add.at(users, (problem.adapter, place), 1)
    pages, seconds = problem.pages_at(place), problem.seconds(place)
    best, effort, least = place.copy(), 0.0, seconds.max()  # relative to the effort at home
    while True:
        source = int(seconds.argmax())
        found = np.flatnonzero(place == source)
        if not len(found):
            break
        more_pages, more_seconds = _with(problem, found, users)
        after = pages + more_pages
        there = seconds + more_seconds + problem.page_seconds * (_over(problem, after) - _over(problem, pages))
        there[~problem.allowed[found] | (after > limits)] = np.inf
        there[:, source] = np.inf
        targets = there.argmin(axis=1)
        there = there[np.arange(len(found)), targets]
        less_pages, less_seconds = _without(problem, found, users, source)
        freed = np.minimum(less_pages, max(0, pages[source] - problem.num_pages[source]))
        left = seconds[source] - less_seconds - problem.page_seconds * freed
        busier = np.maximum(there, left)
        at = int(np.lexsort((there, busier))[0])
        if not busier[at] < seconds[source] - LEAST_GAIN:
            break
        index, target = int(found[at]), int(targets[at])
        place[index] = target
        users[problem.adapter[index], [source, target]] += (-1, 1)
        pages[source] -= less_pages[at]
        pages[target] = after[at, target]
        seconds[source], seconds[target] = left[at], there[at]
        effort += more_seconds[at, target] - less_seconds[at]
        if (objective := seconds.max() + EFFORT_WEIGHT * effort) < least:
            best, least = place.copy(), objective
    return best if problem.objective(best) < problem.objective(problem.home) else problem.home


def _over(problem: Problem, pages: np.ndarray) -> np.ndarray:
    """Pages that find no room."""
    return np.maximum(pages - problem.num_pages, 0)


def _without(problem: Problem, found: np.ndarray, users: np.ndarray, source: int) -> tuple[np.ndarray, np.ndarray]:
    """int64, float64 [f]: pages and seconds that each of the requests takes on its replica."""
    adapter = problem.adapter[found]
    last = (users[adapter, source] == 1) & ~problem.resident[adapter, source]
    seconds = problem.run_seconds[found] + (problem.home[found] != source) * problem.move_seconds[found]
    return problem.pages[found] + last * problem.adapter_pages[adapter], seconds + last * problem.load_seconds[adapter]


def _with(problem: Problem, found: np.ndarray, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64, float64 [f, m]: pages and seconds that each request adds to a replica."""
    adapter = problem.adapter[found]
    comes = ~problem.resident[adapter] & (users[adapter] == 0)
    leaves = problem.home[found][:, None] != np.arange(problem.num_replicas)
    pages = problem.pages[found][:, None] + comes * problem.adapter_pages[adapter][:, None]
    seconds = problem.run_seconds[found][:, None] + leaves * problem.move_seconds[found][:, None]
    return pages, seconds + comes * problem.load_seconds[adapter][:, None]


def newest(problem: Problem) -> np.ndarray:
    """Return an assignment in which no replica has avoidable excess pages, or avoidable excess requests over its slots.

    The target is the replica with the most requests that has a slot and the pages; of equal ones the last.
    """
    place = problem.home.copy()
    stuck = np.zeros(problem.num_replicas, bool)
    while True:
        pages = problem.pages_at(place)
        count = np.bincount(place, minlength=problem.num_replicas)
        full = np.maximum(pages / np.maximum(problem.num_pages, 1), count / np.maximum(problem.num_slots, 1))
        full[stuck] = 0.0
        source = int(full.argmax())
        if full[source] <= 1.0:
            return place
        index = _newest_at(problem, place, source)
        target = None if index is None else _target(problem, place, index, count)
        if index is None or target is None:
            stuck[source] = True
        else:
            place[index] = target


def _newest_at(problem: Problem, place: np.ndarray, source: int) -> int | None:
    """The newest request on a replica that may move and has not."""
    here = (place == source) & (problem.home == source) & (problem.allowed.sum(axis=1) > 1)
    found = np.flatnonzero(here)
    return int(found[-1]) if len(found) else None


def _target(problem: Problem, place: np.ndarray, index: int, count: np.ndarray) -> int | None:
    home = place[index]
    for target in np.lexsort((-np.arange(len(count)), -count)):  # most requests first; of equal ones the last
        if target == home or not problem.allowed[index, target] or count[target] >= problem.num_slots[target]:
            continue
        moved = place.copy()
        moved[index] = target
        if problem.pages_at(moved)[target] <= problem.num_pages[target]:
            return int(target)
    return None
