"""Decode step costs, learned online by ridge regression, for mode policies.

Tests: tests/core/merging/test_fastest_mode.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import mul

from ...memory.adapters.adapter import Adapter
from ..expert_share import share_of_experts
from .mode_policy import Batch, work_of

LEAST = (1.0, 8.0, 4096.0, 1.0, 64.0, 64.0, 0.4)
"""Amount of each term that may well take its share of `LIKELY`, or its amount in the first step, if that is more: a
first step of one row tells little of full ones.
"""

LIKELY = (1.0, 0.4, 0.4, 0.4, 0.4, 0.4, 1.0)
"""Standard deviation of each term's prior, as a share of a step's time. The weights are read once a step whatever it
contains, or as many experts as its rows go to, which may be all of its time; LoRA took at most 38.9 % in the dLoRA
authors' measurements. With equal priors LoRA and KV would explain most of the first steps, and merging would be tried
everywhere at once.
"""

NOISE = 0.05
"""Share of a step's time by which it differs from others of the same work; chosen."""

SETTLED = 8
"""Steps after which prices are fitted anew, though all took about as long as expected."""

KEPT = 0.999
"""Share of the data that each step keeps, because machines may change; chosen: a thousand steps count."""

MERGE_STEPS = 2.0
"""Steps that a merge is taken to cost before there has been one: it reads the weights as a step does, and writes them.
One that is dearer says so with its first matrices.
"""

MAX_SURPRISE = 0.2
"""Most share of its time by which a step that took longer changes prices: others may have had the processor in it.
One that took less is believed: nothing makes a step shorter than its work.
"""


class LearnedPrices:
    """A linear model of a decode step's time with nonnegative coefficients: ridge regression, updated after each step.

    Terms: a step, a row, a token of KV, whether there is LoRA work, rank-rows computed, rank-rows read, and all experts
    of a mixture, of which a step reads the share that its rows go to on average (`share_of_experts`). `LIKELY` is the
    Gaussian prior over coefficients; it decides coefficients that the data do not identify. So merged mode is tried
    where it might help, and once tried its cost is known.
    """

    def __init__(self, expert_share: float = 0.0) -> None:
        """expert_share: of the experts that a row goes to; 0: the model has none."""
        self._expert_share = expert_share
        count = len(LEAST)
        self._units = [1.0] * count  # of the terms: about as much as a step has
        self._prices = [0.0] * count  # of a unit
        self._squares = [[0.0] * count for _ in LEAST]  # of the terms of all steps, in units
        self._sums = [0.0] * count  # of their products with the seconds
        self._guess = [0.0] * count  # 1 / variance of the prices, before there are steps
        self._step = 0.0  # seconds of the last steps, about
        self._merge: float | None = None  # seconds of a merge, by the latest ones
        self._num_steps = 0

    @property
    def terms(self) -> list[float]:
        """Seconds of a step, a row, a token of KV, LoRA work at all, a rank-row computed, a rank-row read, and of all
        experts.
        """
        return [price / unit for price, unit in zip(self._prices, self._units, strict=True)]

    def step_seconds(self, batch: Batch, merged: Adapter | None, context: float) -> float:
        """Never less than a tenth of the time of steps."""
        return max(_product(self._prices, self._terms(batch, merged, context)), self._step / 10, 1e-9)

    def merge_seconds(self, adapter: Adapter) -> float:
        return MERGE_STEPS * self._step if self._merge is None else self._merge

    def observe(self, batch: Batch, merged: Adapter | None, context: float, seconds: float) -> None:
        if seconds <= 0:  # the clock has not moved: that tells nothing
            return
        self._num_steps += 1
        if self._num_steps == 1:
            terms = self._terms(batch, merged, context)
            self._step, self._units = seconds, [max(term, least) for term, least in zip(terms, LEAST, strict=True)]
            self._guess = [(likely * seconds) ** -2 for likely in LIKELY]
        terms = self._terms(batch, merged, context)
        expected = _product(self._prices, terms)
        is_surprise = abs(seconds - expected) > NOISE * self._step
        if self._num_steps > len(LEAST):
            seconds = min(seconds, expected + MAX_SURPRISE * self._step)
        self._step += (seconds - self._step) / min(8, self._num_steps)
        self._add(terms, seconds)
        if is_surprise or self._num_steps % SETTLED == 0:
            self._solve()

    def _add(self, terms: Sequence[float], seconds: float) -> None:
        """Add a step to the equations; the weight of earlier ones decays."""
        weight = (NOISE * self._step) ** -2
        for row, one in zip(self._squares, terms, strict=True):
            share = weight * one
            row[:] = [KEPT * square + share * other for square, other in zip(row, terms, strict=True)]
        share = weight * seconds
        self._sums = [KEPT * total + share * term for total, term in zip(self._sums, terms, strict=True)]

    def _solve(self) -> None:
        known = [[*row] for row in self._squares]
        for index, guess in enumerate(self._guess):
            known[index][index] += guess
        self._prices = nonnegative(known, self._sums, self._prices)

    def observe_merge(self, adapter: Adapter, seconds: float) -> None:
        """Update the cost of a merge, by a factor of 2 at most: one delayed merge must not rule out all later ones."""
        expected = self.merge_seconds(adapter)
        self._merge = min(max(seconds, expected / 2), expected * 2) if expected else seconds

    def _terms(self, batch: Batch, merged: Adapter | None, context: float) -> list[float]:
        """Return the terms of a step, in their units."""
        work = work_of(batch, merged)
        one, rows, tokens, lora, row_ranks, adapter_ranks, experts = self._units
        return [
            1.0 / one,
            work.rows / rows,
            work.rows * context / tokens,
            (work.adapter_ranks > 0) / lora,
            work.row_ranks / row_ranks,
            work.adapter_ranks / adapter_ranks,
            share_of_experts(self._expert_share, work.rows) / experts,
        ]


def nonnegative(squares: Sequence[Sequence[float]], sums: Sequence[float], start: Sequence[float]) -> list[float]:
    """Return the x >= 0 of the least x' squares x / 2 - sums' x, from a start that is not below 0.

    Bro and de Jong's fast non-negative least squares (1997): from a start near by, as a rule, one system of equations.
    In plain Python: with seven unknowns it takes less time than a call of numpy's solver after a step.
    """
    found = [*start]
    free = [index for index, value in enumerate(found) if value > 0]
    least = 1e-12 * max(map(abs, sums))
    for _ in range(4 * len(sums)):
        wanted = dict(zip(free, _solution(squares, sums, free), strict=True))
        if min(wanted.values(), default=0.0) < 0:
            free = _go_towards(wanted, found)
            continue
        for index, value in wanted.items():
            found[index] = value
        gains = [(sums[index] - _product(row, found), index) for index, row in enumerate(squares) if index not in free]
        if not gains or max(gains)[0] <= least:
            break
        free.append(max(gains)[1])
    return found


def _go_towards(wanted: Mapping[int, float], found: list[float]) -> list[int]:
    """Move `found` towards `wanted`, by index, as far as none falls below 0; return the indices still above 0."""
    way, last = min((found[index] / (found[index] - value), index) for index, value in wanted.items() if value < 0)
    for index, value in wanted.items():
        found[index] += way * (value - found[index])
    found[last] = 0.0
    return [index for index in wanted if found[index] > 0]


def _solution(squares: Sequence[Sequence[float]], sums: Sequence[float], free: Sequence[int]) -> list[float]:
    """Solve the equations of the free unknowns by elimination; they are positive definite, and need no pivots."""
    rows = [[*(squares[index][other] for other in free), sums[index]] for index in free]
    for column, pivot in enumerate(rows):
        for row in rows[column + 1 :]:
            factor = row[column] / pivot[column]
            row[column + 1 :] = [
                one - factor * other for one, other in zip(row[column + 1 :], pivot[column + 1 :], strict=True)
            ]
    found: list[float] = []
    for column in reversed(range(len(rows))):
        row = rows[column]
        found.insert(0, (row[-1] - _product(row[column + 1 : -1], found)) / row[column])
    return found


def _product(prices: Sequence[float], amounts: Sequence[float]) -> float:
    return sum(map(mul, prices, amounts))
