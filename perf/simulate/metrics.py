"""Metrics of a study's row: names, formats, and their computation from a serving simulation.

Tests: tests/perf/simulate/test_results.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .records import Records
    from .replica import Replica
    from .setup import Setup

#: Seconds between checks of the replicas, and number of consecutive checks after which an idle one could be removed.
LOOK, RELEASABLE = 10.0, 6


class Outcome:
    """The data of a finished serving simulation.

    loads: requests at each check, `[checks, replicas]`. seconds: from the first arrival to the last end.
    replica_seconds: total time of the replicas. counted: requests after the warm-up; failed: number of failures among
    them.
    """

    def __init__(
        self,
        setup: Setup,
        records: Records,
        replicas: Sequence[Replica],
        num_prompt_tokens: int,
        loads: Sequence[Sequence[int]],
        replica_seconds: float | None,
    ) -> None:
        """replica_seconds: None: all replicas existed throughout."""
        self.setup, self.records, self.replicas = setup, records, replicas
        self.loads = np.zeros((len(loads), len(loads[-1]) if loads else 0), np.int64)  # of later replicas, 0 before
        for row, found in zip(self.loads, loads, strict=True):
            row[: len(found)] = found
        arrival, self.tokens = records.column("arrival"), records.column("tokens")
        self.counted = arrival >= setup.warmup
        self.failed = sum(each >= setup.warmup for each in records.failures)
        self.all_tokens = float(self.tokens.sum()) + num_prompt_tokens
        self.seconds = float((arrival + records.column("e2e")).max() - arrival.min()) if len(records) else 0.0
        self.replica_seconds = setup.replicas * self.seconds if replica_seconds is None else replica_seconds
        self.busy = sum(replica.executor.busy_seconds for replica in replicas)
        starts = [replica.executor.cold_starts for replica in replicas]
        self.assisted = sum(each.num_offloaded for each in starts)
        self.starts = max(1, self.assisted + sum(each.num_streamed for each in starts))
        self.regret = sum(each.regret_seconds for each in starts)

    def of(self, name: str) -> np.ndarray:
        """A column of the records of the counted requests."""
        return self.records.column(name)[self.counted].astype(np.float64)

    def others_ttft(self) -> np.ndarray | None:
        """Times to first token of the tenants other than the flooding one; empty if there is no other."""
        if self.setup.flood is None:
            return None
        return self.of("ttft")[self.records.column("tenant")[self.counted] != self.setup.flood]

    def within_slo(self) -> float | None:
        """Share of requests within the SLO; failures are not."""
        if self.setup.slo is None:
            return None
        return float((np.append(self.of("time_per_token"), [np.inf] * self.failed) <= self.setup.slo).mean())

    def released(self) -> float | None:
        """Share of checks of replicas that belong to `RELEASABLE` consecutive ones that found the replica idle."""
        idle = self.loads == 0
        found = np.zeros_like(idle)
        for start in range(len(idle) - RELEASABLE + 1):
            found[start : start + RELEASABLE] |= idle[start : start + RELEASABLE].all(axis=0)
        return float(found.mean()) if len(idle) else None

    def total(self, count: Callable[[Replica], float]) -> float:
        return sum(map(count, self.replicas))


Compute = Callable[[Outcome], float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """label: with the unit. scale: from the value, in SI units or a share, to the printed number.

    of: computes it; None if it has no value, for example for another kind of study.
    """

    label: str
    scale: float = 1.0
    digits: int = 1
    of: Compute = lambda outcome: None

    def text(self, value: float | str) -> str:
        return value if isinstance(value, str) else f"{value * self.scale:,.{self.digits}f}"


def _mean(name: str) -> Compute:
    return lambda outcome: float(outcome.of(name).mean())


def _percentile(name: str, percent: float) -> Compute:
    return lambda outcome: float(np.percentile(outcome.of(name), percent))


def _others_p99(outcome: Outcome) -> float | None:
    return None if (others := outcome.others_ttft()) is None else float(np.percentile(others, 99))


_MS, _PERCENT = 1e3, 1e2

METRICS: Mapping[str, Metric] = {
    "requests": Metric("requests", 1, 0, lambda it: int(it.counted.sum())),
    "failed": Metric("failed", 1, 0, lambda it: it.failed),
    "ttft_mean": Metric("TTFT, ms", _MS, 0, _mean("ttft")),
    "ttft_p50": Metric("median TTFT, ms", _MS, 0, lambda it: float(np.median(it.of("ttft")))),
    "ttft_p99": Metric("TTFT p99, ms", _MS, 0, _percentile("ttft", 99)),
    "ttft_most": Metric("longest TTFT, ms", _MS, 0, lambda it: float(it.of("ttft").max())),
    "queue_per_token": Metric(
        "queueing per token, ms", _MS, 1, lambda it: float((it.of("queue") / it.of("tokens")).mean())
    ),
    "rate_at_limit": Metric("requests/s at the limit"),
    "others_ttft_p99": Metric("others' TTFT p99, ms", _MS, 0, _others_p99),
    "e2e_mean": Metric("latency, ms", _MS, 0, _mean("e2e")),
    "time_per_token_mean": Metric("time per token, ms", _MS, 1, _mean("time_per_token")),
    "time_per_token_p99": Metric("time per token p99, ms", _MS, 1, _percentile("time_per_token", 99)),
    "time_per_token_p90": Metric("time per token p90, ms", _MS, 1, _percentile("time_per_token", 90)),
    # the sum of latencies over the sum of tokens, which is dLoRA's latency (§7.1)
    "latency_per_token": Metric(
        "latency over tokens, ms", _MS, 1, lambda it: float(it.of("e2e").sum() / it.of("tokens").sum())
    ),
    "merged_share": Metric(
        "merged steps, %",
        _PERCENT,
        1,
        lambda it: (
            it.total(lambda each: each.executor.num_merged_steps) / it.total(lambda each: each.engine.stats().num_steps)
        ),
    ),
    "merges": Metric("merges", 1, 0, lambda it: it.total(lambda each: each.engine.merging.num_merges)),
    "slo_attainment": Metric("within SLO, %", _PERCENT, 1, Outcome.within_slo),
    "cold_share": Metric("cold-start share, %", _PERCENT, 1, _mean("cold_share")),
    "tokens_per_second": Metric("output tokens/s", 1, 0, lambda it: float(it.tokens.sum()) / it.seconds),
    "total_tokens_per_second": Metric("tokens/s", 1, 0, lambda it: it.all_tokens / it.seconds),
    "requests_per_second": Metric("requests/s", 1, 1, lambda it: int(it.counted.sum()) / it.seconds),
    "cold_starts_per_second": Metric(
        "cold starts/s", 1, 1, lambda it: it.total(lambda each: each.engine.num_cold_starts) / it.seconds
    ),
    "assisted_share": Metric("assisted cold starts, %", _PERCENT, 1, lambda it: it.assisted / it.starts),
    "cold_start_regret": Metric("regret of a cold start, ms", _MS, 2, lambda it: it.regret / it.starts),
    # of the request that ended first: its wait for loads, its own and others'
    "first_cold": Metric("first cold start, ms", _MS, 1, lambda it: float(it.of("cold_share")[0] * it.of("e2e")[0])),
    "replica_hours": Metric("replica-hours", 1, 2, lambda it: it.replica_seconds / 3600),
    "replicas_in_use": Metric(
        "replicas in use", 1, 1, lambda it: float((it.loads > 0).sum(axis=1).mean()) if len(it.loads) else None
    ),
    "replicas_released": Metric("idle for ≥ 1 min, %", _PERCENT, 1, Outcome.released),
    "busy_batch": Metric(
        "batch of busy ones",
        1,
        1,
        lambda it: float((it.records.column("e2e") - it.records.column("queue")).sum(dtype=np.float64)) / it.busy,
    ),
    "ttft_increase": Metric("TTFT, +%", _PERCENT, 0),
    "others_ttft_p99_increase": Metric("others' TTFT p99, +%", _PERCENT, 0),
    "time_per_token_increase": Metric("time per token, +%", _PERCENT, 0),
    "e2e_increase": Metric("latency, +%", _PERCENT, 0),
    "moved": Metric("requests moved", 1, 0, lambda it: it.records.num_moved),
    "simulated_seconds": Metric("simulated, s", 1, 0, lambda it: it.seconds),
}

#: Metrics that are relative to another row, and the metric that they compare.
INCREASES = {
    "ttft_increase": "ttft_mean",
    "others_ttft_p99_increase": "others_ttft_p99",
    "time_per_token_increase": "time_per_token_mean",
    "e2e_increase": "e2e_mean",
}


def metrics_of(outcome: Outcome) -> dict[str, float]:
    """All metrics that have a value."""
    found = {name: metric.of(outcome) for name, metric in METRICS.items()}
    return {name: value for name, value in found.items() if value is not None}
