"""Adapters in /metrics: their tiers, under Chorus's names and under vLLM's, which gateways read.

Tests: tests/server/engine/test_metrics.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...memory.adapters.adapter import Tier
from ...memory.adapters.adapter_costs import LOAD_BUCKETS, REST, AdapterCost
from .engine_view import EngineView
from .metric_families import MODEL_LABELS, histograms, label, listed, with_samples
from .top_names import Split, TopNames

_LEVELS = {Tier.DEVICE: "gpu", Tier.HOST: "cpu"}
"""vLLM's words for a resident adapter and one in host memory; `gpu` is the page pool, also on a CPU."""


def adapter_families(view: EngineView, everything: tuple[str, str]) -> Iterator[Metric]:
    """Series of all adapters, and of the adapters in use. everything: values of vLLM's labels."""
    yield GaugeMetricFamily(
        "chorus_adapters_quarantined", "Quarantined adapters; GET /v1/adapters gives the reasons", view.num_quarantined
    )
    yield with_samples(
        GaugeMetricFamily("chorus_adapters", "Adapters by tier", labels=("tier",)),
        *(((tier,), count) for tier, count in view.tier_counts.items()),
    )
    yield with_samples(
        GaugeMetricFamily(
            "chorus_adapter_tier", "1 for the tier of an adapter that is not only on disk", labels=("adapter", "tier")
        ),
        *(((label(one.name), one.tier), 1) for one in view.adapters),
    )
    for name, text, values in (
        ("rank", "Rank of an adapter that is not only on disk", [one.manifest.rank for one in view.adapters]),
        ("pinned", "1 if it is pinned", [int(one.pinned) for one in view.adapters]),
        ("load_seconds", "Duration of its latest load from host memory", [one.load_seconds for one in view.adapters]),
        ("credit", "Credit it earned by yielding to merged adapters (dLoRA)", [one.credit for one in view.adapters]),
    ):
        yield with_samples(
            GaugeMetricFamily(f"chorus_adapter_{name}", text, labels=("adapter",)),
            *(
                ((label(one.name),), value)
                for one, value in zip(view.adapters, values, strict=True)
                if value is not None
            ),
        )
    yield from _residency(view, everything)
    yield with_samples(
        GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in use, in vLLM's words; the value is the time",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        ),
        ((str(view.max_adapters), listed(view.running), listed(view.waiting)), time.time()),
    )


def _residency(view: EngineView, everything: tuple[str, str]) -> Iterator[Metric]:
    """Series that tell llm-d's router the adapters that a server holds.

    Chorus has no fixed adapter slots: the maximum is the resident adapters plus those that still fit.
    """
    yield with_samples(
        GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "1 for an adapter in the page pool (gpu), or only in host memory (cpu)",
            labels=(*MODEL_LABELS, "adapter_name", "level", "pinned", "rank"),
        ),
        *(
            ((*everything, label(one.name), _LEVELS[one.tier], str(one.pinned).lower(), str(one.manifest.rank)), 1)
            for one in view.adapters
            if one.tier in _LEVELS
        ),
    )
    resident = view.tier_counts.get(Tier.DEVICE, 0)
    for name, text, value in (
        ("num_gpu_loaded_lora_adapters", "Adapters in the page pool", resident),
        (
            "max_gpu_lora_adapters",
            "Adapters in the page pool, plus how many more of average size fit without eviction",
            resident + view.num_loadable,
        ),
    ):
        yield with_samples(GaugeMetricFamily(f"vllm:{name}", text, labels=MODEL_LABELS), (everything, value))


class AdapterCostSeries:
    """Series of what adapters cost the engine."""

    def __init__(self, names: TopNames, everything: tuple[str, str]) -> None:
        """names: the adapters with series of their own. everything: values of vLLM's labels."""
        self._names, self._split, self._everything = names, Split(names), everything

    def families(self, costs: Sequence[AdapterCost]) -> Iterator[Metric]:
        rows = {one.name: np.array([one.page_seconds, one.load_seconds, *one.loads]) for one in costs}
        total = sum(rows.values(), np.zeros(3 + len(LOAD_BUCKETS)))
        rows.pop(REST, None)
        self._names.fill(rows.keys())
        series = self._split.of(rows, total)
        yield with_samples(
            CounterMetricFamily(
                "chorus_adapter_page_seconds",
                "Pages of the pool that held an adapter's weights, times the seconds",
                labels=("adapter",),
            ),
            *(((label(name),), row[0]) for name, row in series.items()),
        )
        yield histograms(
            "vllm:lora_adapter_load_seconds",
            "Duration of loads of an adapter into the page pool, with the reads that they waited for",
            (*MODEL_LABELS, "adapter_name"),
            LOAD_BUCKETS,
            (
                ((*self._everything, label(name)), row[2:].astype(int).tolist(), row[1])
                for name, row in series.items()
                if row[2:].any()
            ),
        )
