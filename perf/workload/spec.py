"""A workload as data: arrivals × popularity × lengths × adapters × duration × seed, from TOML or JSON."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .adapters import Adapters
from .arrivals import Arrivals, ReplayArrivals
from .errors import WorkloadError
from .lengths import AnyLengths, Taken
from .model import Strict
from .popularity import Popularity
from .request import BASE, RequestBatch, TraceRequest
from .seeds import hashed_uniform, stream


class WorkloadSpec(Strict):
    """Everything that decides the requests; the same specification gives the same ones, bit for bit.

    Each part draws from a random stream of its own, so changing one leaves the others as they are, and a longer
    workload begins with the requests of a shorter one. Iterating a specification gives its requests in order of
    arrival, and iterating it again the same ones.

    duration: seconds; requests that would come later are left out. requests: how many there are at most. One of the two
    ends the workload, unless a replayed trace does. In place of `arrivals`, `popularity` and `lengths` a file may have
    `trace`, of which all of these are replayed. slo: service classes and their weights. tenants: tenants and their
    weights; one is drawn for each adapter, and one for each request for the base model. Default for both: the trace's
    that the lengths replay; else, for tenants, the adapters' tenants in the popularity's trace; else none. Without set
    ranks, adapters have the ranks in the popularity's trace.
    """

    seed: int = Field(default=0, ge=0)
    duration: PositiveFloat | None = None
    requests: PositiveInt | None = None
    arrivals: Arrivals
    popularity: Popularity
    lengths: AnyLengths
    adapters: Adapters = Adapters()
    slo: dict[str, PositiveFloat] | None = None
    tenants: dict[str, PositiveFloat] | None = None

    @field_validator("slo", "tenants")
    @classmethod
    def _has_some(cls, weights: dict[str, float] | None, info: ValidationInfo) -> dict[str, float] | None:
        if weights is not None and not weights:
            raise ValueError(f"{info.field_name} has no names; give names and weights, or leave it out")
        return weights

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
        """Reads a .toml or .json file. settings: FIELD=VALUE, a dotted field and its value as JSON or a plain word.

        Raises:
            WorkloadError: for a file that cannot be read or a field that is wrong; names the file and the field.
        """
        try:
            text = path.read_text("utf-8")
            fields = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except (OSError, UnicodeDecodeError) as error:
            raise WorkloadError(f"{path}: the specification cannot be read ({error}); check the path") from None
        except ValueError as error:
            kind = "TOML" if path.suffix == ".toml" else "JSON"
            raise WorkloadError(f"{path}: not {kind} ({error}); mend it, or name the file .toml or .json") from None
        return cls.parse(fields, path.parent, str(path), settings)

    @classmethod
    def parse(
        cls, fields: Any, base: Path | None = None, origin: str = "workload", settings: Sequence[str] = ()
    ) -> WorkloadSpec:
        """From plain values, as a file has them. base: what relative paths of traces count from. settings: see `load`.

        Raises:
            WorkloadError: names every wrong field, its value and the mend.
        """
        for setting in settings:
            _change(fields, setting)
        if isinstance(fields, dict) and "trace" in fields:
            fields = _replayed(**fields)
        try:
            return cls.model_validate_json(json.dumps(fields), context={"base": base})
        except ValidationError as error:
            raise WorkloadError("\n".join(_wrong(origin, fields, each) for each in error.errors())) from None

    @property
    def expected(self) -> int:
        """Requests to expect, for laws that depend on it."""
        if self.requests is not None:
            return self.requests
        if self.duration is None:
            raise WorkloadError("popularity: depends on the number of requests; set `requests`, or `adapters.count`")
        return max(1, round(self.arrivals.expected(self.duration)))

    def batches(self) -> Iterator[RequestBatch]:
        """The requests as columns, some thousands at a time."""
        chosen = self.popularity.choose(self.seed, self.adapters.count, lambda: self.expected)
        lengths = self.lengths.take(self.seed)
        name = chosen.name or self.adapters.numbered
        to_base, slo = stream(self.seed, "base share"), stream(self.seed, "slo")
        first = 0
        duration = math.inf if self.duration is None else self.duration
        for times in self.arrivals.times(self.seed, duration):
            wanted = len(times) if self.requests is None else min(len(times), self.requests - first)
            index, taken = chosen.take(wanted), lengths(wanted)
            n = min(wanted, len(index), len(taken.prompt))
            index = index[:n]
            if self.adapters.base_share:
                index = np.where(to_base.random(n) < self.adapters.base_share, BASE, index)
            if n:
                told = _cut(taken, n)
                if self.slo is not None:
                    told["slo"] = _shared_out(self.slo, slo.random(n))
                if self.tenants is not None:
                    told["tenant"] = self._tenants(self.tenants, index, first)
                elif told["tenant"] is None and chosen.tenant is not None:
                    told["tenant"] = [None if each == BASE else chosen.tenant(each) for each in index.tolist()]
                if self.adapters.ranks is None and chosen.rank is not None:
                    ranks = np.array([0 if i == BASE else (chosen.rank(i) or -1) for i in index.tolist()], np.int32)
                else:
                    ranks = self.adapters.ranks_of(index, chosen.count, self.seed)
                yield RequestBatch(
                    first_id=first, arrival_ns=times[:n], adapter=index, rank=ranks, name=name, **told
                )  # fmt: skip
            first += n
            if n < len(times) or first == self.requests:
                return

    def _tenants(self, weights: Mapping[str, float], adapters: np.ndarray, first: int) -> list[str]:
        """Return each request's tenant: its adapter's, by hash; of the base model's requests, one by their number."""
        of_adapters = hashed_uniform(self.seed, "tenants", np.maximum(adapters, 0))
        of_requests = hashed_uniform(self.seed, "base tenants", np.arange(first, first + len(adapters)))
        return _shared_out(weights, np.where(adapters == BASE, of_requests, of_adapters))

    def __iter__(self) -> Iterator[TraceRequest]:  # type: ignore[override]
        return itertools.chain.from_iterable(self.batches())


def _replayed(trace: Any, **others: Any) -> dict[str, Any]:
    """Return the fields of a workload of which a trace tells all that `others` don't."""
    replay = {"mode": "replay", "kind": "trace", "trace": trace}
    return {"arrivals": {"process": "replay", "trace": trace}, "popularity": replay, "lengths": replay, **others}


def _shared_out(weights: Mapping[str, float], uniform: np.ndarray) -> list[str]:
    """Return a name by weight for each number in [0, 1)."""
    names, cumulated = list(weights), np.cumsum(list(weights.values()))
    places = np.searchsorted(cumulated[:-1] / cumulated[-1], uniform, side="right")
    return [names[place] for place in places.tolist()]


def _cut(taken: Taken, n: int) -> dict[str, Any]:
    told = {"slo": taken.slo, "tenant": taken.tenants, "session": taken.sessions}
    return {
        **{name: None if found is None else found[:n] for name, found in told.items()},
        "prompt_tokens": taken.prompt[:n],
        "output_tokens": taken.output[:n],
        "hash_ids": None if taken.hash_ids is None else taken.hash_ids[:n],
        "hash_block_tokens": taken.hash_block_tokens,
    }


def _change(fields: Any, setting: str) -> None:
    name, equals, value = setting.partition("=")
    if not name or not equals:
        raise WorkloadError(f"--set {setting}: give FIELD=VALUE, like popularity.alpha=2")
    *tables, last = name.split(".")
    for table in tables:
        fields = fields.setdefault(table, {}) if isinstance(fields, dict) else None
    if not isinstance(fields, dict):
        raise WorkloadError(f"{name}: no such field; give the dotted name of one, like popularity.alpha")
    try:
        fields[last] = json.loads(value)
    except json.JSONDecodeError:
        fields[last] = value


def _wrong(origin: str, fields: Any, error: Any) -> str:
    """One line for an error of pydantic's."""
    field = _name(fields, error) or "workload"
    message = error["msg"].removeprefix("Value error, ")
    match error["type"]:
        case "value_error":
            return f"{origin}: {field}: {message}"
        case "extra_forbidden":
            return f"{origin}: {field}: no such field here; take it out, or check its spelling"
        case "missing":
            return f"{origin}: {field}: is missing; set it"
        case "union_tag_not_found":
            return f"{origin}: {field}: {error['ctx']['discriminator']} is missing; say which"
        case "union_tag_invalid":
            name, known = error["ctx"]["discriminator"].strip("'"), error["ctx"]["expected_tags"]
            return f"{origin}: {field}.{name} is {error['ctx']['tag']!r}; use one of {known}"
        case _:
            return f"{origin}: {field} is {error['input']!r:.80}: {message}"


def _name(fields: Any, error: Any) -> str:
    """The dotted name of the wrong field: pydantic's location without the kinds of unions, which are no fields."""
    parts, location = [], error["loc"]
    for place, part in enumerate(location):
        last = place == len(location) - 1
        if isinstance(fields, dict) and (part in fields or (last and error["type"] == "missing")):
            parts.append(part)
            fields = fields.get(part)
        elif isinstance(fields, list) and isinstance(part, int):
            parts.append(part)
            fields = fields[part] if part < len(fields) else None
    return ".".join(map(str, parts))
