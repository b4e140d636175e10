"""Summary of a workload, found in one pass; only distinct adapters and prefix blocks are remembered."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .request import NS, TraceRequest

_PERCENTILES = (50, 90, 99)
_CHUNK = 4096
_TOP = 10


class Summary:
    """Counts requests as they pass. window: seconds over which distinct adapters are counted."""

    def __init__(self, window: float = 60.0) -> None:
        self.window = window
        self.requests = 0
        self._first = self._last = 0
        self._squares = 0.0
        self._adapters: Counter[str | None] = Counter()
        self._ranks: Counter[int | None] = Counter()
        self._slo: Counter[str | None] = Counter()
        self._tokens = {"prompt_tokens": np.zeros(0, np.int64), "output_tokens": np.zeros(0, np.int64)}
        self._now: set[str | None] = set()
        self._window_index = 0
        self._distinct: list[int] = []
        self._seen_blocks: set[int] = set()
        self._blocks = self._shared = 0

    def watch(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """The same requests, counted."""
        left = iter(requests)
        while chunk := list(itertools.islice(left, _CHUNK)):
            self._add(chunk)
            yield from chunk

    def _add(self, chunk: list[TraceRequest]) -> None:
        times = np.rint(np.array([each.arrival for each in chunk]) * NS).astype(np.int64)
        if not self.requests:
            self._first = self._last = int(times[0])
        gaps = np.diff(times, prepend=self._last) / NS
        self._squares += float((gaps * gaps).sum())
        self._last = int(times[-1])
        self.requests += len(chunk)
        for name, counted in self._tokens.items():
            found = np.bincount(np.array([getattr(each, name) for each in chunk]), minlength=len(counted))
            found[: len(counted)] += counted
            self._tokens[name] = found
        self._adapters.update(each.adapter for each in chunk)
        self._ranks.update(each.rank for each in chunk)
        self._slo.update(each.slo for each in chunk)
        for each in chunk:
            index = int(each.arrival // self.window)
            if index != self._window_index:
                self._distinct += [len(self._now)] + [0] * (index - self._window_index - 1)
                self._now, self._window_index = set(), index
            if each.adapter is not None:
                self._now.add(each.adapter)
            for block in each.hash_ids:
                self._shared += block in self._seen_blocks
                self._seen_blocks.add(block)
            self._blocks += len(each.hash_ids)

    def result(self) -> dict[str, Any]:
        """Plain values.

        rate: requests per second between the first and the last. burstiness_cv: coefficient of variation of the gaps.
        shares are of all requests.
        """
        gaps = self.requests - 1
        seconds = (self._last - self._first) / NS
        mean = seconds / gaps if gaps > 0 else 0.0
        spread = max(self._squares / gaps - mean * mean, 0.0) if gaps > 0 else 0.0
        to_adapters = [(name, count) for name, count in self._adapters.most_common() if name is not None]
        distinct = [*self._distinct, len(self._now)] if self.requests else []
        return {
            "requests": self.requests,
            "seconds": seconds,
            "rate": 1 / mean if mean else None,
            "burstiness_cv": math.sqrt(spread) / mean if mean else None,
            "prompt_tokens": _spread(self._tokens["prompt_tokens"]),
            "output_tokens": _spread(self._tokens["output_tokens"]),
            "adapters": len(to_adapters),
            "base_share": self._adapters[None] / self.requests if self.requests else 0.0,
            "top_adapters": {name: count / self.requests for name, count in to_adapters[:_TOP]},
            "distinct_adapters_per_window": {
                "window_seconds": self.window,
                "mean": sum(distinct) / len(distinct) if distinct else 0.0,
                "most": max(distinct, default=0),
            },
            "ranks": _shares(self._ranks, self.requests),
            "slo": _shares(self._slo, self.requests),
            "repeated_prefix_blocks": self._shared / self._blocks if self._blocks else None,
        }


def table(result: dict[str, Any]) -> str:
    """The summary for people."""
    rows = [("requests", f"{result['requests']:,} in {result['seconds']:,.1f} s")]
    if result["rate"]:
        rows += [
            ("rate", f"{result['rate']:.2f} req/s"),
            ("burstiness", f"CV {result['burstiness_cv']:.2f} of the gaps"),
        ]
    for name, title in (("prompt_tokens", "prompt tokens"), ("output_tokens", "output tokens")):
        found = result[name]
        if found:
            percentiles = ", ".join(f"p{percent} {found[f'p{percent}']}" for percent in _PERCENTILES)
            rows.append((title, f"mean {found['mean']:.1f}, {percentiles}, most {found['most']}"))
    window = result["distinct_adapters_per_window"]
    rows.append(("adapters", f"{result['adapters']:,}, {result['base_share']:.1%} of the requests to the base model"))
    rows.append(
        (f"in {window['window_seconds']:g} s", f"{window['mean']:.1f} adapters on average, {window['most']} at most")
    )
    if result["top_adapters"]:
        rows.append(("top", ", ".join(f"{name} {share:.1%}" for name, share in result["top_adapters"].items())))
    for name in ("ranks", "slo"):
        if list(result[name]) != ["unknown"]:
            rows.append((name, ", ".join(f"{value} {share:.1%}" for value, share in result[name].items())))
    if result["repeated_prefix_blocks"] is not None:
        rows.append(("prefix blocks", f"{result['repeated_prefix_blocks']:.1%} seen before"))
    return "\n".join(f"{name:<14} {value}" for name, value in rows)


def _shares(counts: Counter[Any], total: int) -> dict[str, float]:
    named = sorted((("unknown" if key is None else key), count) for key, count in counts.items() if key is not None)
    unknown = [("unknown", counts[None])] if counts[None] else []
    return {str(key): count / total for key, count in [*named, *unknown]}


def _spread(counted: np.ndarray) -> dict[str, float] | None:
    """Mean and percentiles (the smallest value that so many do not exceed) of counted values."""
    total = int(counted.sum())
    if not total:
        return None
    cumulated = np.cumsum(counted)
    values = {f"p{each}": int(np.searchsorted(cumulated, total * each / 100)) for each in _PERCENTILES}
    mean = float(counted @ np.arange(len(counted))) / total
    return {"mean": mean, **values, "most": len(counted) - 1}
