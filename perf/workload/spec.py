"""A workload as data: arrivals × popularity × lengths × adapters × duration × seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from .adapters import Adapters
from .arrivals import Arrivals, ReplayArrivals
from .fields import Strict, WorkloadError, put, read_fields, wrong_fields
from .lengths import AnyLengths
from .popularity import Chosen, Popularity
from .request import BASE, NS, TraceRequest
from .seeds import hashed_uniform, stream


class WorkloadSpec(Strict):
    """Everything that determines the requests; the same specification gives the same requests, bit for bit.

    Each part uses its own random stream, so a change of one does not affect the others, and a longer workload begins
    with the requests of a shorter one. Iterating a specification gives its requests in order of arrival, the same every
    time.
    """

    seed: int = Field(default=0, ge=0)
    duration: PositiveFloat | None = None
    """Seconds; later requests are left out."""
    requests: PositiveInt | None = None
    """Most requests. One of the two ends the workload, unless a replayed trace does. Instead of `arrivals`,
    `popularity` and `lengths` a file may have `trace`, which gives all of them.
    """
    arrivals: Arrivals
    popularity: Popularity
    lengths: AnyLengths
    adapters: Adapters = Adapters()
    tenants: dict[str, PositiveFloat] | None = Field(default=None, min_length=1)
    """Tenants and their weights; one is drawn for each adapter, and one for each request for the base model. Default:
    the tenants in the popularity's trace, or none. Without given ranks, adapters have the ranks in the popularity's
    trace.
    """

    @model_validator(mode="after")
    def _ends(self) -> WorkloadSpec:
        replay = self.arrivals if isinstance(self.arrivals, ReplayArrivals) else None
        if replay:
            replay.trace.needs("arrival", "arrivals")
        if self.duration is None and self.requests is None and replay is None:
            raise ValueError("the workload never ends; set duration (seconds), requests, or both")
        return self

    @classmethod
    def load(cls, path: Path, settings: Sequence[str] = ()) -> WorkloadSpec:
        """Read a TOML or JSON file. settings: FIELD=VALUE, a dotted field and its value as JSON or a plain word.

        Raises:
            WorkloadError: for a file that cannot be read or a field that is wrong; names the file and the field.
        """
        return cls.parse(read_fields(path), path.parent, str(path), settings)

    @classmethod
    def parse(
        cls, fields: Any, base: Path | None = None, origin: str = "workload", settings: Sequence[str] = ()
    ) -> WorkloadSpec:
        """From plain values, as a file has them. base: directory for relative paths of traces. settings: see `load`.

        Raises:
            WorkloadError: names every wrong field, its value and the fix.
        """
        if settings:
            fields = deepcopy(fields)
        for setting in settings:
            _change(fields, setting)
        if isinstance(fields, dict) and "trace" in fields:
            fields = _replayed(**fields)
        try:
            return cls.model_validate_json(json.dumps(fields), context={"base": base})
        except ValidationError as error:
            raise WorkloadError(wrong_fields(origin, fields, error)) from None

    @property
    def expected(self) -> int:
        """Expected requests, for laws that depend on their number."""
        if self.requests is not None:
            return self.requests
        if self.duration is None:
            raise WorkloadError("popularity: depends on the number of requests; set `requests`, or `adapters.count`")
        return max(1, round(self.arrivals.expected(self.duration)))

    def __iter__(self) -> Iterator[TraceRequest]:  # type: ignore[override]
        chosen = self.popularity.choose(self.seed, self.adapters.count, lambda: self.expected)
        lengths, to_base = self.lengths.take(self.seed), stream(self.seed, "base share")
        first = 0
        for times in self.arrivals.times(self.seed, math.inf if self.duration is None else self.duration):
            wanted = len(times) if self.requests is None else min(len(times), self.requests - first)
            index, (prompt, output) = chosen.take(wanted), lengths(wanted)
            n = min(wanted, len(index), len(prompt))
            index = index[:n]
            if self.adapters.base_share:
                index = np.where(to_base.random(n) < self.adapters.base_share, BASE, index)
            if n:
                columns = (
                    range(first, first + n),
                    (times[:n] / NS).tolist(),
                    self._names(chosen, index),
                    prompt[:n].tolist(),
                    output[:n].tolist(),
                    self._ranks(chosen, index),
                    self._tenants(chosen, index, first),
                )
                yield from map(TraceRequest, *columns)
            first += n
            if n < len(times) or first == self.requests:
                return

    def _names(self, chosen: Chosen, index: np.ndarray) -> list[str | None]:
        """Return the name of each request's adapter; each distinct one is made once."""
        name = self.adapters.numbered if chosen.names is None else chosen.names.__getitem__
        distinct, inverse = np.unique(index, return_inverse=True)
        table = [None if each == BASE else name(each) for each in distinct.tolist()]
        return [table[each] for each in inverse.tolist()]

    def _ranks(self, chosen: Chosen, index: np.ndarray) -> list[int | None]:
        ranks = self.adapters.ranks
        if ranks is not None:
            return np.where(index == BASE, 0, ranks.of(index, self.seed)).tolist()
        known = {**(chosen.ranks or {}), BASE: 0}
        return [known.get(each) for each in index.tolist()]

    def _tenants(self, chosen: Chosen, index: np.ndarray, first: int) -> Sequence[str | None] | repeat[None]:
        """Return each request's tenant: its adapter's, by hash; for the base model by the request's number."""
        if self.tenants is None:
            return repeat(None) if chosen.tenants is None else chosen.tenants[first : first + len(index)]
        of_adapters = hashed_uniform(self.seed, "tenants", np.maximum(index, 0))
        of_requests = hashed_uniform(self.seed, "base tenants", np.arange(first, first + len(index)))
        return _shared_out(self.tenants, np.where(index == BASE, of_requests, of_adapters))


def _replayed(trace: Any, **others: Any) -> dict[str, Any]:
    """Return the fields of a workload that come from a trace unless `others` has them."""
    replay = {"kind": "trace", "trace": trace}
    return {"arrivals": {"process": "replay", "trace": trace}, "popularity": replay, "lengths": replay, **others}


def _shared_out(weights: Mapping[str, float], uniform: np.ndarray) -> list[str]:
    """Return a name by weight for each number in [0, 1)."""
    names, cumulated = list(weights), np.cumsum(list(weights.values()))
    places = np.searchsorted(cumulated[:-1] / cumulated[-1], uniform, side="right")
    return [names[place] for place in places.tolist()]


def _change(fields: Any, setting: str) -> None:
    name, equals, value = setting.partition("=")
    if not name or not equals:
        raise WorkloadError(f"--set {setting}: give FIELD=VALUE, like popularity.alpha=2")
    with suppress(json.JSONDecodeError):
        value = json.loads(value)
    put(fields, name.split("."), value)
