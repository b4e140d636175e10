"""Punica's migration (§5.3): the newest request leaves the fullest replica, and is placed as a new one is (§5.1)."""

from __future__ import annotations

import numpy as np

from .problem import Problem


def newest(problem: Problem) -> np.ndarray:
    """Return a place in which no replica has more pages, or more requests than slots, than it can help.

    The target is the replica with most requests that has a slot and the pages; of equal ones the last.
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
    """The newest request at a replica that may move and has not."""
    here = (place == source) & (problem.home == source) & (problem.allowed.sum(axis=1) > 1)
    found = np.flatnonzero(here)
    return int(found[-1]) if len(found) else None


def _target(problem: Problem, place: np.ndarray, index: int, count: np.ndarray) -> int | None:
    home = place[index]
    for target in np.lexsort((-np.arange(len(count)), -count)):  # most requests first, of equal ones the last
        if target == home or not problem.allowed[index, target] or count[target] >= problem.num_slots[target]:
            continue
        moved = place.copy()
        moved[index] = target
        if problem.pages_at(moved)[target] <= problem.num_pages[target]:
            return int(target)
    return None
