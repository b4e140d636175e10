"""Families of Prometheus series: their labels and samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

MODEL_LABELS = ("model_name", "engine")
"""Labels of vLLM's series."""

ENGINE = "0"
"""vLLM's engine number; there is only one engine here."""


@lru_cache(1 << 12)
def label(name: str) -> str:
    """A name as a label's value: characters that UTF-8 can't encode are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def listed(names: Iterable[str]) -> str:
    """Names joined by commas, as gateways split them: a comma in a name becomes %2C, a per cent sign %25."""
    return ",".join(label(name).replace("%", "%25").replace(",", "%2C") for name in names)


def with_samples(
    family: GaugeMetricFamily | CounterMetricFamily, *samples: tuple[Sequence[str], float]
) -> GaugeMetricFamily | CounterMetricFamily:
    """The family with its samples: the labels' values, and the sample's own."""
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def histogram(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Sequence[str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> HistogramMetricFamily:
    """A histogram with one sample. counts: per bucket, the last above all bounds. total: sum of all observations."""
    return histograms(name, text, labels, bounds, [(values, counts, total)])


def histograms(
    name: str,
    text: str,
    labels: Sequence[str],
    bounds: Sequence[float],
    samples: Iterable[tuple[Sequence[str], Sequence[int], float]],
) -> HistogramMetricFamily:
    """A histogram with several samples: the labels' values, and `counts` and `total` as for `histogram`."""
    family = HistogramMetricFamily(name, text, labels=labels)
    ends = [*map(str, map(float, bounds)), "+Inf"]
    for values, counts, total in samples:
        family.add_metric(values, list(zip(ends, accumulate(counts), strict=True)), total)
    return family
