"""Adds up the counts of processes that share a port: a scrape reaches any of them, and no count may seem to fall."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ..access.shared_bounds import RequestSlots
from ..executors import Repeating
from .top_names import OTHER

log = logging.getLogger(__name__)

PUBLISH_SECONDS = 1.0
"""Seconds of counting that the other processes may not know of; a process that is killed loses as much."""

MOST_PROCESSES = 256

ADDED_UP = ("counter", "histogram")
CREATED = "_created"
"""Suffix of the sample with the time at which counting began, which is not a count."""

_Key = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels
_Counts = dict[str, dict[_Key, float]]  # by family


class SharedCounts(Repeating, Collector):
    """Counters and histograms of a registry, added up over all processes that share a directory; other series are this
    process's own.

    Each process has a slot with a file there. A process that takes over the slot of one that has ended continues its
    counts. It publishes its own from `start` to `stop`, and for the last time at `stop`.
    """

    def __init__(self, counted: CollectorRegistry, directory: Path) -> None:
        """Raises RuntimeError if no slot is free."""
        super().__init__("counts", PUBLISH_SECONDS, PUBLISH_SECONDS)
        directory.mkdir(exist_ok=True)
        self._slots = RequestSlots(directory / "count_seats")
        slot = self._slots.take("", MOST_PROCESSES)
        if slot is None:
            raise RuntimeError(f"more than {MOST_PROCESSES} processes count requests in {directory}")
        self._counted, self._directory = counted, directory
        self._file = directory / f"counts-{slot}"
        self._before = _read(self._file)
        self._published: _Counts | None = None
        self._kept: frozenset[str] | None = None

    def forget_all_but(self, models: Collection[str]) -> None:
        """Count models other than these as `OTHER`."""
        self._kept = kept = frozenset(models)
        self._before = {family: _folded(counts, kept) for family, counts in self._before.items()}

    def publish(self) -> None:
        """Write this process's counts, and the ones that it took over, unless nothing has changed."""
        counts = {
            family.name: _added(_counts_of(family), self._before.get(family.name, {}))
            for family in self._counted.collect()
            if family.type in ADDED_UP
        }
        if counts == self._published:
            return
        told = {
            family: [[name, dict(labels), value] for (name, labels), value in samples.items()]
            for family, samples in counts.items()
        }
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(told))
        new.replace(self._file)
        self._published = counts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        files = (file for file in self._directory.glob("counts-*") if file != self._file and not file.suffix)
        more = [self._before, *map(_read, files)]
        for family in self._counted.collect():
            yield self._sum(family, more) if family.type in ADDED_UP else family

    def _sum(self, family: Metric, more: Iterable[_Counts]) -> Metric:
        rest: dict[_Key, float] = defaultdict(float)
        for one in more:
            for key, value in _folded(one.get(family.name, {}), self._kept).items():
                rest[key] += value
        whole = Metric(family.name, family.documentation, family.type, family.unit)
        for sample in family.samples:
            whole.add_sample(sample.name, sample.labels, sample.value + rest.pop(_key(sample), 0.0))
        for (name, labels), value in rest.items():
            whole.add_sample(name, dict(labels), value)
        return whole

    def _turn(self) -> None:
        try:
            self.publish()
        except OSError as error:  # the directory may be gone at the end
            if not self._stopping.is_set():
                log.warning("counts of requests can't be shared with the other API servers: %s", error)


def _counts_of(family: Metric) -> dict[_Key, float]:
    return {_key(sample): sample.value for sample in family.samples if not sample.name.endswith(CREATED)}


def _key(sample: Sample) -> _Key:
    return sample.name, tuple(sorted(sample.labels.items()))


def _added(own: dict[_Key, float], before: dict[_Key, float]) -> dict[_Key, float]:
    return {key: own.get(key, 0.0) + before.get(key, 0.0) for key in [*own, *(before.keys() - own.keys())]}


def _folded(counts: dict[_Key, float], models: Collection[str] | None) -> dict[_Key, float]:
    """The counts, with those of models that are not among `models` under `OTHER`. None: as they are."""
    if models is None:
        return counts
    folded: dict[_Key, float] = defaultdict(float)
    for (name, labels), value in counts.items():
        kept = tuple(
            (label, OTHER if label == "model" and value_ not in models else value_) for label, value_ in labels
        )
        folded[name, kept] += value
    return folded


def _read(file: Path) -> _Counts:
    """Counts of a file; empty if it is missing or damaged."""
    try:
        return {
            family: {(name, tuple(sorted(labels.items()))): float(value) for name, labels, value in samples}
            for family, samples in json.loads(file.read_text()).items()
        }
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("counts of requests in %s can't be read, and restart at 0: %s", file, error)
    return {}
