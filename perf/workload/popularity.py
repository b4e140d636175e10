"""Popularity of adapters: distributions of requests over adapters.

`distinct`, `uniform`, `zipf` and `identical` are the four workloads of Punica (§7, "Workloads"). Adapter 0 is the most
popular one. A law gives the probability of each adapter, or follows the requests of a trace.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, NonNegativeFloat

from .fields import Strict, WorkloadError
from .request import BASE
from .seeds import stream
from .trace import Csv, TraceError


class Chosen(NamedTuple):
    """Adapters of the coming requests."""

    take: Callable[[int], np.ndarray]
    """Indices of the next n, int64; fewer if a trace ends."""
    names: list[str] | None = None
    """Names of the indices; None: the workload numbers them."""
    ranks: dict[int, int] | None = None
    """Ranks of the indices, if a trace has them."""
    tenants: list[str | None] | None = None
    """Tenants of the requests, if a trace has them."""


class Law(Strict):
    """A law of popularity. `expected`: number of requests of the workload, called only if a law depends on it."""

    @abstractmethod
    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        """count: of adapters, if the specification sets it."""


class Distinct(Law):
    """Each request is for its own adapter; with a `count`, in rotation."""

    kind: Literal["distinct"]

    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        taken = itertools.count()

        def take(n: int) -> np.ndarray:
            index = np.fromiter(taken, np.int64, n)
            return index if count is None else index % count

        return Chosen(take)


class Identical(Law):
    """All requests are for the same adapter."""

    kind: Literal["identical"]

    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        return Chosen(lambda n: np.zeros(n, np.int64))


class Weighted(Law):
    """Laws with a weight per adapter."""

    exact: bool = False
    """Instead of independent draws, use exact shares (`counts`) in random order, like Punica's benchmark; needs the
    number of requests.
    """

    @abstractmethod
    def weights(self, count: int | None, expected: Callable[[], int]) -> np.ndarray:
        """Weight of each adapter, most popular first, float64; need not sum to 1."""

    def counts(self, requests: int, count: int | None) -> np.ndarray:
        """Requests of each adapter for exact shares: the weights' shares by largest remainder."""
        weights = self.weights(count, lambda: requests)
        shares = weights / weights.sum() * requests
        counts = np.floor(shares).astype(np.int64)
        left = requests - int(counts.sum())
        counts[np.argsort(counts - shares, kind="stable")[:left]] += 1
        return counts

    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        rng = stream(seed, "popularity")
        if self.exact:
            counts = self.counts(expected(), count)
            return Chosen(_in_turn(rng.permutation(np.repeat(np.arange(len(counts), dtype=np.int32), counts))))
        weights = self.weights(count, expected)
        cumulated = np.cumsum(weights / weights.sum())[:-1]
        return Chosen(lambda n: np.searchsorted(cumulated, rng.random(n), side="right"))


class Uniform(Weighted):
    """All adapters are equally popular: `adapters.count` of them, or ⌈√n⌉ for n requests (Punica §7)."""

    kind: Literal["uniform"]

    def weights(self, count: int | None, expected: Callable[[], int]) -> np.ndarray:
        return np.ones(count or math.isqrt(max(expected(), 1) - 1) + 1)


class Zipf(Weighted):
    """Zipf-α as Punica defines it (§7): the i-th most popular adapter has α times the requests of the i+1-th.

    So shares fall geometrically, unlike the power law that others call Zipf: that one is `power_law`. Punica's Skewed
    workload is α = 1.5. Without `adapters.count` there are as many adapters as Punica's benchmark makes for n requests,
    and `exact` distributes them the same way: runs of ⌊α^k⌋ requests, k = 0, 1, …, and the rest as one more.
    """

    kind: Literal["zipf"]
    alpha: float = Field(default=1.5, gt=1.0)

    def weights(self, count: int | None, expected: Callable[[], int]) -> np.ndarray:
        return self.alpha ** -np.arange(count or len(self._lengths(expected())), dtype=np.float64)

    def counts(self, requests: int, count: int | None) -> np.ndarray:
        if count is not None:
            return super().counts(requests, count)
        return np.array(self._lengths(requests), np.int64)

    def _lengths(self, requests: int) -> list[int]:
        lengths: list[int] = []
        run, total = 1.0, 0
        while total + math.floor(run) < requests:
            lengths.append(math.floor(run))
            total += lengths[-1]
            run *= self.alpha
        return sorted([*lengths, requests - total], reverse=True)


class PowerLaw(Weighted):
    """The i-th most popular of `adapters.count` adapters has a weight of i^−exponent: the usual Zipf's law."""

    kind: Literal["power_law"]
    exponent: NonNegativeFloat = 1.0

    def weights(self, count: int | None, expected: Callable[[], int]) -> np.ndarray:
        if count is None:
            raise WorkloadError("popularity: a power_law needs the number of adapters; set `adapters.count`")
        return np.arange(1, count + 1, dtype=np.float64) ** -self.exponent


class FromTrace(Law):
    """Adapters of a trace, in its order, with its ranks and tenants."""

    kind: Literal["trace"]
    trace: Csv

    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        self.trace.needs("adapter", "popularity")
        if count is not None:
            raise WorkloadError(
                f"adapters.count is {count}, but popularity takes its adapters from a trace; leave it out"
            )
        rows = self.trace.rows()
        numbers: dict[str | None, int] = {None: BASE}
        ranks: dict[int, int] = {}
        for row in rows:
            number = numbers.setdefault(row.adapter, len(numbers) - 1)
            if row.rank is None or number == BASE:
                continue
            if row.rank < 1 or ranks.setdefault(number, row.rank) != row.rank:
                have = f"adapter {row.adapter!r} has rank {row.rank}" + (f" and {ranks[number]}" if row.rank else "")
                raise TraceError(self.trace.path, None, have, "give each adapter one rank, of at least 1")
        index = np.array([numbers[row.adapter] for row in rows], np.int64)
        names = [name for name in numbers if name is not None]
        return Chosen(_in_turn(index), names, ranks, [row.tenant for row in rows])


def _in_turn(index: np.ndarray) -> Callable[[int], np.ndarray]:
    """Return an iterator over the indices, n at a time, fewer at the end."""
    left = iter(index.tolist())
    return lambda n: np.array(list(itertools.islice(left, n)), np.int64)


Popularity = Annotated[Distinct | Identical | Uniform | Zipf | PowerLaw | FromTrace, Field(discriminator="kind")]
