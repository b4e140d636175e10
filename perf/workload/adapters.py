"""The adapters of a workload: their number, names and ranks."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from .fields import Strict
from .seeds import hashed_uniform


class FixedRank(Strict):
    """One rank for all."""

    kind: Literal["fixed"]
    rank: PositiveInt

    def of(self, index: np.ndarray, seed: int) -> np.ndarray:
        return np.full(len(index), self.rank)


class ChoiceRank(Strict):
    """A rank per adapter, drawn from `ranks` with `weights` (default: equal), independent of popularity."""

    kind: Literal["choice"]
    ranks: list[PositiveInt] = Field(min_length=1)
    weights: list[PositiveFloat] | None = None

    @model_validator(mode="after")
    def _as_many(self) -> ChoiceRank:
        if self.weights is not None and len(self.weights) != len(self.ranks):
            raise ValueError(f"{len(self.weights)} weights for {len(self.ranks)} ranks; give one for each")
        return self

    def of(self, index: np.ndarray, seed: int) -> np.ndarray:
        weights = np.array(self.weights or [1.0] * len(self.ranks))
        bounds = np.cumsum(weights / weights.sum())[:-1]
        # by hash, not from a table: a workload with ever new adapters uses constant memory
        places = np.searchsorted(bounds, hashed_uniform(seed, "ranks", np.maximum(index, 0)), side="right")
        return np.array(self.ranks)[places]


class Adapters(Strict):
    """count: number of adapters; default: as many as the popularity needs. base_share: share of requests to the base
    model.

    ranks: default unknown. Adapters are numbered; 0 is the most popular.
    """

    count: PositiveInt | None = None
    base_share: float = Field(default=0.0, ge=0.0, le=1.0)
    ranks: Annotated[FixedRank | ChoiceRank, Field(discriminator="kind")] | None = None

    @staticmethod
    def numbered(index: int) -> str:
        return f"adapter-{index:05d}"

    def rank_of(self, index: int, seed: int) -> int | None:
        """Return the rank of an adapter by its number; None where ranks are not set."""
        return None if self.ranks is None else int(self.ranks.of(np.array([index]), seed)[0])
