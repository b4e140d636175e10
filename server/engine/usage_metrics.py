"""Series of what models and tenants have used.

Tests: tests/server/engine/test_usage.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .metric_families import MODEL_LABELS, histograms, label, with_samples
from .top_names import Split, TopNames
from .usage import (
    CACHED,
    FIRST_REASON,
    GENERATED,
    NOTHING,
    PAGE_SECONDS,
    PROMPT,
    QUEUE,
    REASONS,
    TPOT,
    TTFT,
    Times,
    Usage,
)

_COUNTS = (
    ("prompt_tokens", PROMPT, "Prompt tokens of accepted requests", "prompt_tokens"),
    ("cached_tokens", CACHED, "Prompt tokens of ended requests that the prefix cache had", ""),
    ("generated_tokens", GENERATED, "Generated tokens", "generation_tokens"),
    ("kv_page_seconds", PAGE_SECONDS, "Pages of KV of ended requests, times the seconds that they held them", ""),
)
"""Counters: name, column, text, and vLLM's name of the sum over all models."""

_TIMES = (
    ("time_to_first_token", TTFT, "Time from arrival to the first token"),
    ("time_per_output_token", TPOT, "Mean time per output token after the first, of ended requests"),
    ("queue_time", QUEUE, "Time from arrival to admission, of ended requests"),
)


class ModelUsage(Collector):
    """Series by model, and their sums under the names that vLLM's dashboards use."""

    def __init__(self, usage: Usage, names: TopNames, everything: tuple[str, str]) -> None:
        """names: the models with series of their own. everything: values of vLLM's labels."""
        self._usage, self._names, self._everything = usage, names, everything
        self._split = Split(names)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        rows = self._usage.by_model()
        total, series = _series(rows, self._names, self._split)
        yield from _families("", "model", series)
        for _, column, text, theirs in _COUNTS:
            if theirs:
                family = CounterMetricFamily(f"vllm:{theirs}", text, labels=MODEL_LABELS)
                yield with_samples(family, (self._everything, total[column]))
        family = CounterMetricFamily(
            "vllm:request_success", "Finished requests", labels=(*MODEL_LABELS, "finished_reason")
        )
        reasons = zip(REASONS, total[FIRST_REASON:], strict=False)
        yield with_samples(family, *(((*self._everything, reason), count) for reason, count in reasons if count))
        first = TTFT.counts(total), TTFT.seconds(total)
        name, text = "time_to_first_token_seconds", _TIMES[0][2]
        yield histograms(f"chorus_{name}", text, (), TTFT.bounds, [((), *first)])
        yield histograms(f"vllm:{name}", text, MODEL_LABELS, TTFT.bounds, [(self._everything, *first)])


class TenantUsage(Collector):
    """Series by tenant."""

    def __init__(self, usage: Usage, names: TopNames) -> None:
        """names: the tenants with series of their own."""
        self._usage, self._names, self._split = usage, names, Split(names)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        _, series = _series(self._usage.by_tenant(), self._names, self._split)
        yield from _families("tenant_", "tenant", series)


class TenantBudgets(Collector):
    """Tokens that tenants may still use, of those with the least left."""

    def __init__(self, budgets: Callable[[], Mapping[str, float]], most: int) -> None:
        self._budgets, self._most = budgets, most

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        left = sorted(self._budgets().items(), key=lambda each: each[1])[: self._most]
        yield with_samples(
            GaugeMetricFamily(
                "chorus_tenant_budget_left_tokens",
                "Tokens that a tenant with tokens_per_minute may use now; below 0 it owes tokens",
                labels=("tenant",),
            ),
            *(((label(name),), tokens) for name, tokens in left),
        )


def _series(rows: Mapping[str, np.ndarray], names: TopNames, split: Split) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The sum of all rows, and the rows that have series."""
    total = sum(rows.values(), NOTHING)
    names.choose({name: row[PROMPT] + row[GENERATED] for name, row in rows.items()})
    return total, split.of(rows, total)


def _families(prefix: str, noun: str, series: Mapping[str, np.ndarray]) -> Iterator[Metric]:
    """The families of models or of tenants. prefix: of the names of counters. noun: the label."""
    yield with_samples(
        CounterMetricFamily(
            f"chorus_{prefix}requests", "Finished requests by finish reason", labels=(noun, "finish_reason")
        ),
        *(
            ((label(name), reason), count)
            for name, row in series.items()
            for reason, count in zip(REASONS, row[FIRST_REASON:], strict=False)
            if count
        ),
    )
    for name, column, text, _ in _COUNTS:
        family = CounterMetricFamily(f"chorus_{prefix}{name}", text, labels=(noun,))
        yield with_samples(family, *(((label(one),), row[column]) for one, row in series.items()))
    for name, times, text in _TIMES:
        yield _times(f"chorus_{noun}_{name}_seconds", text, noun, times, series)


def _times(name: str, text: str, noun: str, times: Times, series: Mapping[str, np.ndarray]) -> Metric:
    samples = (
        ((label(one),), times.counts(row), times.seconds(row))
        for one, row in series.items()
        if row[times.begin : times.end].any()
    )
    return histograms(name, text, (noun,), times.bounds, samples)
