"""The adapters of a workload: how many, their names and their ranks."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from .errors import WorkloadError
from .model import Strict
from .request import BASE
from .seeds import hashed_uniform


class FixedRank(Strict):
    """One rank for all."""

    kind: Literal["fixed"]
    rank: PositiveInt

    def places(self, index: np.ndarray, count: int | None, seed: int) -> np.ndarray:
        return np.zeros(len(index), np.int64)

    @property
    def ranks(self) -> list[int]:
        return [self.rank]


class ChoiceRank(Strict):
    """A rank per adapter, drawn from `ranks` with `weights` (default: equal), whatever its popularity."""

    kind: Literal["choice"]
    ranks: list[PositiveInt] = Field(min_length=1)
    weights: list[PositiveFloat] | None = None

    @model_validator(mode="after")
    def _as_many(self) -> ChoiceRank:
        if self.weights is not None and len(self.weights) != len(self.ranks):
            raise ValueError(f"{len(self.weights)} weights for {len(self.ranks)} ranks; give one for each")
        return self

    def places(self, index: np.ndarray, count: int | None, seed: int) -> np.ndarray:
        weights = np.array(self.weights or [1.0] * len(self.ranks))
        bounds = np.cumsum(weights / weights.sum())[:-1]
        # by hash, not from a table: a workload of ever new adapters stays flat in memory
        return np.searchsorted(bounds, hashed_uniform(seed, "ranks", index), side="right")


class PopularityRank(Strict):
    """Ranks in order of popularity: the most popular `count / len(ranks)` adapters have the first, and so on."""

    kind: Literal["popularity"]
    ranks: list[PositiveInt] = Field(min_length=1)

    def places(self, index: np.ndarray, count: int | None, seed: int) -> np.ndarray:
        if count is None:
            raise WorkloadError(
                "adapters.ranks: ranks by popularity need the number of adapters; set `adapters.count`, or use the "
                "kind 'choice'"
            )
        return np.minimum(index * len(self.ranks) // count, len(self.ranks) - 1)


Ranks = Annotated[FixedRank | ChoiceRank | PopularityRank, Field(discriminator="kind")]


class Adapters(Strict):
    """count: how many there are; default: as the popularity needs. base_share: share of requests to the base model.

    name: of adapter i, 0 being the most popular; {i} stands for the number and takes a format. ranks: default unknown.
    """

    count: PositiveInt | None = None
    base_share: float = Field(default=0.0, ge=0.0, le=1.0)
    name: str = "adapter-{i:05d}"
    ranks: Ranks | None = None

    @model_validator(mode="after")
    def _name_numbers(self) -> Adapters:
        try:
            distinct = self.name.format(i=0) != self.name.format(i=1)
        except (LookupError, ValueError):
            distinct = False
        if not distinct:
            raise ValueError(f"name is {self.name!r}; it must hold the number as {{i}}, like 'adapter-{{i:05d}}'")
        return self

    def numbered(self, index: int) -> str:
        return self.name.format(i=index)

    def ranks_of(self, index: np.ndarray, count: int | None, seed: int) -> np.ndarray:
        """int32, for adapter indices; −1 unknown, 0 for the base model."""
        if self.ranks is None:
            ranks = np.full(len(index), -1, np.int32)
        else:
            places = self.ranks.places(np.maximum(index, 0), count, seed)
            ranks = np.array(self.ranks.ranks, np.int32)[places]
        return np.where(index == BASE, np.int32(0), ranks)
