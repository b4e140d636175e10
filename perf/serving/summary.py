"""From records to numbers: latencies, rates, attainment of objectives, errors; in all and per adapter.

Times are in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..report.table import spread
from .load import ClientCost
from .record import Record

#: Above these the client's own share of what it measures is no longer small.
MAX_LAG_MS = 20.0
MAX_CPU = 0.8


@dataclass(frozen=True)
class Objectives:
    """Service level objectives in milliseconds; None: not asked for. An answer of one token meets any TPOT."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met(self, record: Record) -> dict[str, bool]:
        """Of each objective, whether a request met it; one that failed met none."""
        values = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2e": record.e2e} if record.ok else {}
        return {
            name: record.ok and values[name] * 1e3 <= limit for name, limit in asdict(self).items() if limit is not None
        }


def summarise(records: Sequence[Record], objectives: Objectives) -> dict[str, Any]:
    """All that is reported of a load, with the same of each model under `models`."""
    seconds = duration(records)
    by_model: dict[str, list[Record]] = {}
    for record in records:
        by_model.setdefault(record.model, []).append(record)
    return {
        "seconds": seconds,
        **_part(records, objectives, seconds),
        "models": {name: _part(part, objectives, seconds) for name, part in sorted(by_model.items())},
    }


def duration(records: Iterable[Record]) -> float:
    """Seconds from the load's beginning to the end of its last request."""
    return max((record.ended for record in records), default=0.0)


def _part(records: Sequence[Record], objectives: Objectives, seconds: float) -> dict[str, Any]:
    """The numbers of some of the requests, over the time of the whole load."""
    done = [record for record in records if record.ok]
    prompt, output = sum(record.prompt_tokens for record in done), sum(record.output_tokens for record in done)

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    return {
        "requests": len(records), "completed": len(done),
        "errors": dict(sorted(Counter(record.error for record in records if not record.ok).items())),
        "prompt_tokens": prompt, "output_tokens": output, "uncounted": sum(not record.counted for record in done),
        "requests_per_second": rate(len(done)), "output_tokens_per_second": rate(output),
        "total_tokens_per_second": rate(prompt + output),
        "ttft_ms": milliseconds(record.ttft for record in done),
        "tpot_ms": milliseconds(record.tpot for record in done if record.tpot is not None),
        "itl_ms": milliseconds(gap for record in done for gap in record.itl),
        "e2e_ms": milliseconds(record.e2e for record in done),
        "client_delay_ms": milliseconds(record.client_delay for record in done),
        **_attainment(records, objectives, rate),
    }  # fmt: skip


def milliseconds(seconds: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and extremes in milliseconds; None of nothing."""
    return spread(np.fromiter(seconds, dtype=np.float64) * 1e3)


def _attainment(records: Sequence[Record], objectives: Objectives, rate: Any) -> dict[str, Any]:
    """Shares of all requests that were to be served, and what met every objective per second."""
    verdicts = [objectives.met(record) for record in records]
    if not verdicts or not verdicts[0]:
        return {}
    good = [record for record, met in zip(records, verdicts, strict=True) if all(met.values())]
    shares = {name: sum(met[name] for met in verdicts) / len(records) for name in verdicts[0]}
    return {
        "slo_attainment": {**shares, "all": len(good) / len(records)},
        "goodput_requests_per_second": rate(len(good)),
        "goodput_output_tokens_per_second": rate(sum(record.output_tokens for record in good)),
    }


def client_summary(cost: ClientCost, records: Sequence[Record]) -> dict[str, Any]:
    """Cost of the client itself, and what of it is worth a warning."""
    delay, lag = milliseconds(record.client_delay for record in records), milliseconds(cost.lags)
    cpu = cost.cpu / cost.wall if cost.wall else 0.0
    warnings = []
    if lag and lag["p99"] > MAX_LAG_MS:
        warnings.append(
            f"the client's event loop lagged by {lag['p99']:.0f} ms at the 99th percentile: that much of any latency "
            "may be the client's own"
        )
    if cpu > MAX_CPU:
        warnings.append(f"the client took {cpu:.0%} of a processor: it may be what limits the rate")
    return {
        "delay_ms": delay,
        "loop_lag_ms": lag,
        "cpu_share": cpu,
        "cpu_us_per_chunk": cost.cpu / cost.chunks * 1e6 if cost.chunks else None,
        "chunks": cost.chunks,
        "warnings": warnings,
    }
