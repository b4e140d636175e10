"""Metrics of a study's row: names, units and formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """label: with the unit. scale: from the value, in SI units or a share, to what is written."""

    label: str
    scale: float = 1.0
    digits: int = 1

    def text(self, value: float | str) -> str:
        return value if isinstance(value, str) else f"{value * self.scale:,.{self.digits}f}"


_MS, _PERCENT = 1e3, 1e2

METRICS: Mapping[str, Metric] = {
    "requests": Metric("requests", digits=0),
    "failed": Metric("failed", digits=0),
    "ttft_mean": Metric("TTFT, ms", _MS, 0),
    "ttft_p50": Metric("median TTFT, ms", _MS, 0),
    "ttft_p99": Metric("TTFT p99, ms", _MS, 0),
    "ttft_most": Metric("longest TTFT, ms", _MS, 0),
    "queue_per_token": Metric("queueing per token, ms", _MS),
    "rate_at_limit": Metric("requests/s at the limit"),
    "others_ttft_p99": Metric("others' TTFT p99, ms", _MS, 0),
    "tpot_mean": Metric("TPOT, ms", _MS),
    "e2e_mean": Metric("latency, ms", _MS, 0),
    "time_per_token_mean": Metric("time per token, ms", _MS),
    "time_per_token_p99": Metric("time per token p99, ms", _MS),
    "time_per_token_p90": Metric("time per token p90, ms", _MS),
    "latency_per_token": Metric("latency over tokens, ms", _MS),
    "merged_share": Metric("merged steps, %", _PERCENT),
    "merges": Metric("merges", digits=0),
    "slo_attainment": Metric("within SLO, %", _PERCENT),
    "cold_share": Metric("cold-start share, %", _PERCENT),
    "tokens_per_second": Metric("output tokens/s", digits=0),
    "total_tokens_per_second": Metric("tokens/s", digits=0),
    "tokens_per_busy_second": Metric("tokens per busy second", digits=0),
    "cold_starts_per_second": Metric("cold starts/s"),
    "assisted_share": Metric("assisted cold starts, %", _PERCENT),
    "cold_start_regret": Metric("regret of a cold start, ms", _MS, 2),
    "replica_hours": Metric("replica-hours", digits=2),
    "replicas_in_use": Metric("replicas in use"),
    "replicas_released": Metric("idle for ≥ 1 min, %", _PERCENT),
    "busy_batch": Metric("batch of busy ones"),
    "ttft_increase": Metric("TTFT, +%", _PERCENT, 0),
    "others_ttft_p99_increase": Metric("others' TTFT p99, +%", _PERCENT, 0),
    "time_per_token_increase": Metric("time per token, +%", _PERCENT, 0),
    "e2e_increase": Metric("latency, +%", _PERCENT, 0),
    "allocation_failures": Metric("allocation failures", digits=0),
    "external_fragmentation": Metric("external fragmentation, %", _PERCENT),
    "internal_fragmentation": Metric("internal fragmentation, %", _PERCENT, 2),
    "most_adapters": Metric("most adapters at once"),
    "load_seconds": Metric("load time, ms", _MS, 2),
    "moved": Metric("requests moved", digits=0),
    "simulated_seconds": Metric("simulated, s", digits=0),
}

#: Metrics that are relative to another row, and the metric that they compare.
INCREASES = {
    "ttft_increase": "ttft_mean", "others_ttft_p99_increase": "others_ttft_p99",
    "time_per_token_increase": "time_per_token_mean", "e2e_increase": "e2e_mean",
}  # fmt: skip

#: An order of rows is reproduced if it holds in this share of the seeds, unless `--check` gives another.
SHARE = 0.8
