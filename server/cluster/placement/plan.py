"""A plan: an assignment made by one of the planners, and a bound on its distance from the optimum."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from .heuristics import greedy, newest
from .problem import Problem
from .program import Program
from .settings import MigrationSettings

NEED_HIGHS = ("ilp", "rounding")


def has_highs() -> bool:
    return find_spec("highspy") is not None


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """place: int64 [n], the assignment. objective: its value; before: the value of staying. bound: no assignment has a
    lower value; None: unknown.
    """

    place: np.ndarray
    objective: float
    before: float
    bound: float | None

    @property
    def regret(self) -> float | None:
        """Share by which the plan's value is above the bound, and thus at most above the best plan's."""
        return self.objective / self.bound - 1 if self.bound else None


def planned(problem: Problem, planner: str, settings: MigrationSettings) -> np.ndarray:
    """int64 [n]: the replica of each request, by a planner of `PLANNERS`."""
    if planner == "newest":
        return newest(problem)
    start = greedy(problem)
    if planner == "greedy":
        return start
    program = Program(problem)
    return program.best(start, settings) if planner == "ilp" else program.rounded(start, settings)


def plan_moves(problem: Problem, planner: str, settings: MigrationSettings) -> PlacementPlan:
    """planner: a name of `PLANNERS`. The bound needs highspy."""
    place = planned(problem, planner, settings)
    bound = Program(problem).bound() if has_highs() else None
    return PlacementPlan(place, problem.objective(place), problem.objective(problem.home), bound)
