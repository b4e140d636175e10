"""Co-migration as an integer program on HiGHS (dLoRA §5.2): the optimum, the LP bound, and the paper's rounding.

Tests: tests/server/cluster/placement/test_plans.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .problem import EFFORT_WEIGHT, Problem
from .settings import MigrationSettings

BOUND_SECONDS = 10.0
"""Most seconds for a bound; a plan is made without it, too."""

GAP = 5e-3
"""Share by which a solution may be above the optimum: the inputs are estimates anyway."""


class Program:
    """The program of a problem, as mixed-integer and as linear program.

    Variables: x[i, j], request i at replica j; y[k, j], adapter k comes to j; over[j], pages without room; longest.

        minimise  longest + EFFORT_WEIGHT · (Σ move_seconds x + Σ load_seconds y)
        Σ_j x[i, j] = 1
        x[i, j] ≤ y[k, j]                          k the adapter of i, not resident at j
        Σ_i pages x + Σ_k adapter_pages y ≤ num_pages + over,  over ≤ limits − num_pages
        longest ≥ busy_seconds + Σ_i run_seconds x + Σ_moved move_seconds x + Σ_k load_seconds y + page_seconds over
    """

    def __init__(self, problem: Problem) -> None:
        """Needs highspy."""
        self.problem = problem
        n, m = problem.allowed.shape
        self._request, self._replica = np.nonzero(problem.allowed)  # of each x
        adapter = problem.adapter[self._request]
        comes = ~problem.resident[adapter, self._replica]
        pairs = adapter[comes] * m + self._replica[comes]
        self._pairs, where = np.unique(pairs, return_inverse=True)  # of each y: adapter · m + replica
        self._num_x, self._num_y = len(self._request), len(self._pairs)
        self._moved = self._replica != problem.home[self._request]
        y_adapter, y_replica = np.divmod(self._pairs, m)
        first_y, first_over = self._num_x, self._num_x + self._num_y
        longest = first_over + m
        x, y, over = np.arange(self._num_x), first_y + np.arange(self._num_y), first_over + np.arange(m)
        matched = x[comes]
        c = len(matched)
        move = np.where(self._moved, problem.move_seconds[self._request], 0.0)
        load = problem.load_seconds[y_adapter]
        one, replicas, matches = n, np.arange(m), np.arange(c)
        entries = [  # (row, column, value)
            (self._request, x, np.ones(self._num_x)),
            (one + matches, matched, np.ones(c)),
            (one + matches, first_y + where, -np.ones(c)),
            (one + c + self._replica, x, problem.pages[self._request]),
            (one + c + y_replica, y, problem.adapter_pages[y_adapter]),
            (one + c + replicas, over, -np.ones(m)),
            (one + c + m + self._replica, x, problem.run_seconds[self._request] + move),
            (one + c + m + y_replica, y, load),
            (one + c + m + replicas, over, np.full(m, problem.page_seconds)),
            (one + c + m + replicas, np.full(m, longest), -np.ones(m)),
        ]
        self._rows = tuple(np.concatenate(part) for part in zip(*entries, strict=True))
        ones, none = np.ones(n), np.full(c + 2 * m, -np.inf)
        self._low = np.concatenate((ones, none))
        self._high = np.concatenate((ones, np.zeros(c), problem.num_pages, -problem.busy_seconds))
        self._most = np.concatenate(
            (np.ones(self._num_x + self._num_y), np.maximum(problem.limits - problem.num_pages, 0), [np.inf])
        )
        self._cost = np.concatenate((EFFORT_WEIGHT * move, EFFORT_WEIGHT * load, np.zeros(m), [1.0]))

    def bound(self) -> float | None:
        """The LP's optimum, a lower bound for all assignments; None if it is not found in `BOUND_SECONDS`."""
        solver = self._solver(BOUND_SECONDS)
        solver.run()
        found = solver.modelStatusToString(solver.getModelStatus()) == "Optimal"
        return float(solver.getInfo().objective_function_value) if found else None

    def best(self, start: np.ndarray, settings: MigrationSettings) -> np.ndarray:
        """Return the best assignment found, no worse than `start`."""
        place = self._solve(start, settings, integer_requests=True).argmax(axis=1)
        problem = self.problem
        return place if problem.fits(place) and problem.objective(place) < problem.objective(start) else start

    def rounded(self, start: np.ndarray, settings: MigrationSettings) -> np.ndarray:
        """Return the paper's plan: x is relaxed, and a request goes where its x is largest.

        Requests that find no pages there stay: the paper swaps them out.
        """
        place, problem = self.problem.home.copy(), self.problem
        wanted = self._solve(start, settings, integer_requests=False).argmax(axis=1)
        for index in np.flatnonzero(wanted != place):
            moved = place.copy()
            moved[index] = wanted[index]
            if problem.fits(moved):
                place = moved
        return place

    def _solve(self, start: np.ndarray, settings: MigrationSettings, *, integer_requests: bool) -> np.ndarray:
        """float64 [n, m]: x of the solution; of `start` if there is none."""
        from highspy import HighsSolution, HighsVarType

        solver = self._solver(settings.solve_seconds)
        solver.setOptionValue("mip_max_nodes", settings.solve_nodes)
        solver.setOptionValue("mip_rel_gap", GAP)
        count = self._num_x + self._num_y
        first = 0 if integer_requests else self._num_x
        columns = np.arange(first, count, dtype=np.int32)
        if len(columns):
            solver.changeColsIntegrality(
                len(columns), columns, np.full(len(columns), HighsVarType.kInteger.value, np.uint8)
            )
        solution = HighsSolution()
        solution.col_value = self._values(start)
        solver.setSolution(solution)
        solver.run()
        values = np.array(solver.getSolution().col_value)
        if len(values) < count:
            values = np.array(self._values(start))
        share = np.zeros_like(self.problem.allowed, dtype=np.float64)
        share[self._request, self._replica] = values[: self._num_x]
        return share

    def _values(self, place: np.ndarray) -> list[float]:
        """Values of all variables for an assignment."""
        problem = self.problem
        x = place[self._request] == self._replica
        y = problem.incoming(place).ravel()[self._pairs]
        over = np.maximum(problem.pages_at(place) - problem.num_pages, 0)
        return np.concatenate((x, y, over, [problem.seconds(place).max()])).tolist()

    def _solver(self, seconds: float) -> Any:
        import highspy

        row, column, value = self._rows
        order = np.lexsort((column, row))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._cost), len(self._low)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = self._cost, np.zeros(len(self._cost)), self._most
        lp.row_lower_, lp.row_upper_ = self._low, self._high
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=len(self._low)))))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = column[order], value[order]
        solver = highspy.Highs()
        solver.silent()
        solver.setOptionValue("time_limit", seconds)
        solver.setOptionValue("threads", 1)
        solver.passModel(lp)
        return solver
