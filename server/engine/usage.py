"""Adds up what models (the base, and each adapter) and tenants use: metrics, the operator's page and bills are made of
this one account.

Tests: tests/server/engine/test_usage.py
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...core.requests.types import FinishReason
from ...memory.adapters.composition import is_composition
from .metric_families import label
from .top_names import OTHER

if TYPE_CHECKING:
    from .request_metrics import Ended
    from .usage_file import UsageFile

TTFT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40)
TPOT_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2)
QUEUE_BUCKETS = (0.001, 0.005, 0.02, 0.08, 0.3, 1.2, 5, 20, 60, 300)
REASONS = tuple(FinishReason)

MAX_ROWS = 1 << 14
"""Most pairs of a model and a tenant with counts of their own; 8 MB. Further tenants are counted as `OTHER`."""


class Times(NamedTuple):
    """A histogram's place in a row: the counts of its buckets, and behind them the sum of its seconds."""

    begin: int
    bounds: tuple[float, ...]

    @property
    def end(self) -> int:
        return self.begin + len(self.bounds) + 2

    def observe(self, values: array[float], seconds: float) -> None:
        values[self.begin + bisect_left(self.bounds, seconds)] += 1
        values[self.end - 1] += seconds

    def counts(self, row: np.ndarray) -> list[int]:
        return row[self.begin : self.end - 1].astype(int).tolist()

    def seconds(self, row: np.ndarray) -> float:
        return float(row[self.end - 1])

    def mean(self, row: np.ndarray) -> float | None:
        """None without an observation."""
        count = row[self.begin : self.end - 1].sum()
        return float(row[self.end - 1] / count) if count else None


PROMPT, CACHED, GENERATED, PAGE_SECONDS, FIRST_REASON = range(5)
"""Places in a row."""
TTFT = Times(FIRST_REASON + len(REASONS), TTFT_BUCKETS)
TPOT = Times(TTFT.end, TPOT_BUCKETS)
QUEUE = Times(TPOT.end, QUEUE_BUCKETS)
_EMPTY = array("d", bytes(8 * QUEUE.end))
_ERROR = FIRST_REASON + REASONS.index(FinishReason.ERROR)
NOTHING = np.zeros(QUEUE.end)


def num_requests(row: np.ndarray) -> int:
    """Ended choices."""
    return int(row[FIRST_REASON : TTFT.begin].sum())


def num_errors(row: np.ndarray) -> int:
    """Choices that ended with an error of the engine or of the adapter."""
    return int(row[_ERROR])


class Spent:
    """Counts of a model's requests for one tenant."""

    __slots__ = ("model", "num_open", "tenant", "values")

    def __init__(self, model: str, tenant: str) -> None:
        self.model, self.tenant = model, tenant
        self.num_open = 0
        """Choices in progress, which still add to it."""
        self.values = array("d", _EMPTY)


class Usage:
    """Counts by model and tenant; written on the event loop, read on any thread."""

    def __init__(self, file: UsageFile | None = None) -> None:
        """file: also gets the ended requests, for bills."""
        self._file = file
        self._rows: dict[tuple[str, str], Spent] = {}

    def accepted(self, model: str, tenant: str, num_choices: int, prompt_tokens: int) -> Spent:
        """The engine has accepted a request; the result is for the calls that follow."""
        model = OTHER if is_composition(model) else label(model)  # of compositions there is no end
        spent = self._row(model, label(tenant))
        spent.num_open += num_choices
        spent.values[PROMPT] += prompt_tokens
        return spent

    def generated(self, spent: Spent, tokens: int) -> None:
        spent.values[GENERATED] += tokens

    def began(self, spent: Spent, seconds: float) -> None:
        """A choice has its first token, so many seconds after its request came."""
        TTFT.observe(spent.values, seconds)

    def ended(self, spent: Spent, model: str, reason: str, one: Ended) -> None:
        """A choice has ended. model: as the request named it."""
        values = spent.values
        spent.num_open -= 1
        values[FIRST_REASON + REASONS.index(FinishReason(reason))] += 1
        values[PAGE_SECONDS] += one.page_seconds
        if one.is_first_choice:
            values[CACHED] += one.num_cached_tokens
        if one.queue_seconds is not None:
            QUEUE.observe(values, one.queue_seconds)
        if one.token_seconds is not None:
            TPOT.observe(values, one.token_seconds)
        if self._file is not None:
            self._file.note(model, spent.tenant, reason, one)

    def by_model(self) -> dict[str, np.ndarray]:
        rows = [*self._rows.values()]
        return _sums([one.model for one in rows], rows)

    def by_tenant(self) -> dict[str, np.ndarray]:
        rows = [*self._rows.values()]
        return _sums([one.tenant for one in rows], rows)

    def forget_all_but(self, models: Collection[str]) -> None:
        """Count models not among these as `OTHER`, once no request of theirs is in progress. models: their labels."""
        for (model, tenant), spent in [*self._rows.items()]:
            if model != OTHER and model not in models and not spent.num_open:
                del self._rows[model, tenant]
                rest = self._row(OTHER, tenant).values
                for index, value in enumerate(spent.values):
                    rest[index] += value

    def _row(self, model: str, tenant: str) -> Spent:
        if (spent := self._rows.get((model, tenant))) is None:
            if len(self._rows) >= MAX_ROWS:
                tenant = OTHER
                if len(self._rows) >= 2 * MAX_ROWS and (model, tenant) not in self._rows:
                    model = OTHER
            spent = self._rows.setdefault((model, tenant), Spent(model, tenant))
        return spent


def _sums(names: list[str], rows: list[Spent]) -> dict[str, np.ndarray]:
    if not rows:
        return {}
    index = {name: at for at, name in enumerate(dict.fromkeys(names))}
    values = np.frombuffer(b"".join([one.values.tobytes() for one in rows])).reshape(len(rows), -1)
    sums = np.zeros((len(index), values.shape[1]))
    np.add.at(sums, [index[name] for name in names], values)
    return dict(zip(index, sums, strict=True))
