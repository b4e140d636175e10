"""Popularity of adapters: laws by which requests are spread over adapters.

`distinct`, `uniform`, `zipf` and `identical` are the four workloads of Punica (§7, "Workloads"). Adapter 0 is the most
popular one. A law names the probability of each adapter, or goes by the requests of a trace.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from .errors import TraceError, WorkloadError
from .model import Strict
from .request import BASE
from .seeds import stream
from .traces import TraceSource


class Chosen(NamedTuple):
    """Adapters of the coming requests.

    take: indices of the next n, int64; fewer where a trace ends. count: how many adapters there are, None: not known.
    name: of an index, None: the workload numbers them. tenant, rank: of an index, None: the trace does not tell.
    """

    take: Callable[[int], np.ndarray]
    count: int | None
    name: Callable[[int], str] | None = None
    tenant: Callable[[int], str | None] | None = None
    rank: Callable[[int], int | None] | None = None


class Law(Strict):
    """A law of popularity. `expected`: requests of the workload, asked for only where a law depends on it."""

    @abstractmethod
    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        """count: of adapters, where the specification sets it."""


class Distinct(Law):
    """Each request is for an adapter of its own; with a `count`, by turns."""

    kind: Literal["distinct"]

    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        taken = 0

        def take(n: int) -> np.ndarray:
            nonlocal taken
            index = np.arange(taken, taken + n, dtype=np.int64)
            taken += n
            return index if count is None else index % count

        return Chosen(take, count)


class Identical(Law):
    """All requests are for the same adapter."""

    kind: Literal["identical"]

    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        return Chosen(lambda n: np.zeros(n, np.int64), 1)


class Weighted(Law):
    """Laws with a weight per adapter."""

    @abstractmethod
    def weights(self, count: int | None, expected: Callable[[], int]) -> np.ndarray:
        """Weight of each adapter, most popular first, float64; need not sum to 1."""

    def counts(self, requests: int, count: int | None) -> np.ndarray:
        """Requests of each adapter when `requests` are dealt out exactly: the weights' shares by largest remainder."""
        weights = self.weights(count, lambda: requests)
        shares = weights / weights.sum() * requests
        counts = np.floor(shares).astype(np.int64)
        left = requests - int(counts.sum())
        counts[np.argsort(counts - shares, kind="stable")[:left]] += 1
        return counts

    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        weights = self.weights(count, expected)
        return Chosen(_independent(weights, stream(seed, "popularity")), len(weights))


class Uniform(Weighted):
    """All adapters are equally popular: `adapters.count` of them, or ⌈√n⌉ for n requests (Punica §7)."""

    kind: Literal["uniform"]

    def weights(self, count: int | None, expected: Callable[[], int]) -> np.ndarray:
        return np.ones(count or math.isqrt(max(expected(), 1) - 1) + 1)


class Zipf(Weighted):
    """Zipf-α as Punica defines it (§7): the i-th most popular adapter has α times the requests of the i+1-th.

    So shares fall geometrically, which is not the power law that others call Zipf: that one is `power_law`. Punica's
    Skewed workload is α = 1.5. Without `adapters.count` there are as many adapters as Punica's benchmark makes for n
    requests, and `counts` deals them out as it does: runs of ⌊α^k⌋ requests, k = 0, 1, …, and the rest as one more.
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
    """Adapters of a trace.

    mode "counts": independent draws with the trace's own shares, its base-model requests included. "replay": the
    trace's sequence itself. skewness: dLoRA's mapping (§7.1) of many functions onto `adapters.count` adapters:
    functions sorted by their number of requests, `skewness` at a time to the first adapter, as many to the second, and
    so on by turns. The larger, the more skewed. rate and time are the arrivals' concern.
    """

    kind: Literal["trace"]
    trace: TraceSource
    mode: Literal["counts", "replay"] = "counts"
    skewness: PositiveInt | None = None

    def choose(self, seed: int, count: int | None, expected: Callable[[], int]) -> Chosen:
        self.trace.needs("adapter", "popularity")
        if self.skewness is not None and count is None:
            raise WorkloadError("popularity: skewness maps functions onto adapters; set `adapters.count`")
        if self.skewness is None and count is not None:
            raise WorkloadError(
                f"adapters.count is {count}, but popularity takes its adapters from a trace; leave it out, or set "
                "popularity.skewness to map them"
            )
        names: list[str] = []
        index: dict[str | None, int] = {}
        counts = self.trace.adapter_counts(seed) if self.mode == "counts" or self.skewness else []
        if self.skewness:
            counts = [each for each in counts if each[0] is not None]
            index |= {name: place // self.skewness % count for place, (name, _) in enumerate(counts)}
        index[None] = BASE

        def number(name: str | None) -> int:
            if name not in index:
                index[name] = len(names)
                names.append(name)
            return index[name]

        name = None if self.skewness else names.__getitem__
        told = _Told(self.trace.path)
        tenant = told.tenants.get if self.trace.has("tenant") else None
        rank = told.ranks.get if self.trace.has("rank") and not self.skewness else None
        if self.mode == "replay":
            return Chosen(_rechunk(self._indices(seed, number, told)), count, name, tenant, rank)
        if tenant or rank:
            for _ in self._indices(seed, number, told):
                """Learns what the trace tells of adapters."""
        numbers = np.array([number(each) for each, _ in counts])
        weights = np.array([requests for _, requests in counts], np.float64)
        if self.skewness:
            weights, numbers = np.bincount(numbers, weights, minlength=count), np.arange(count)
        take = _independent(weights, stream(seed, "popularity"))
        return Chosen(lambda n: numbers[take(n)], count or len(names), name, tenant, rank)

    def _indices(self, seed: int, index: Callable[[str | None], int], told: _Told) -> Iterator[np.ndarray]:
        """Indices of the trace's adapters, row by row; tenants and ranks of the adapters are noted on the way."""
        for chunk in self.trace.columns("adapter", "tenant", "rank", seed=seed):
            found = [index(name) for name in chunk["adapter"]]
            for each in zip(found, chunk["adapter"], chunk["tenant"], chunk["rank"], strict=True):
                told.note(*each, mapped=self.skewness is not None)
            yield np.array(found, np.int64)


class _Told:
    """Tenant and rank of each adapter of a trace: its first, and the only one."""

    def __init__(self, path: object) -> None:
        self._path = path
        self.tenants: dict[int, str | None] = {}
        self.ranks: dict[int, int] = {}

    def note(self, index: int, name: str | None, tenant: str | None, rank: int | None, *, mapped: bool) -> None:
        """mapped: several adapters have one index. Raises TraceError where an adapter has two ranks."""
        self.tenants.setdefault(index, tenant)
        if rank is None or index == BASE or mapped:
            return
        if rank < 1 or self.ranks.setdefault(index, rank) != rank:
            have = f"adapter {name!r} has rank {rank}" + (f" and {self.ranks[index]}" if rank else "")
            raise TraceError(self._path, None, have, "give each adapter one rank, of at least 1")


def _independent(weights: np.ndarray, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """Draws of an index by weight."""
    cumulated = np.cumsum(weights / weights.sum())[:-1]
    return lambda n: np.searchsorted(cumulated, rng.random(n), side="right")


def _rechunk(chunks: Iterator[np.ndarray]) -> Callable[[int], np.ndarray]:
    """Hands out the chunks' elements n at a time, int64, fewer at the end."""
    left = np.empty(0, np.int64)

    def take(n: int) -> np.ndarray:
        nonlocal left
        held = [left]
        while sum(map(len, held)) < n and (chunk := next(chunks, None)) is not None:
            held.append(chunk)
        joined = np.concatenate(held) if len(held) > 1 else left
        left = joined[n:]
        return joined[:n].astype(np.int64)

    return take


Popularity = Annotated[Distinct | Identical | Uniform | Zipf | PowerLaw | FromTrace, Field(discriminator="kind")]
