"""Summary of a workload, from columns that are kept while its requests pass."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .request import TraceRequest

_PERCENTILES = (50, 90, 99)
_TOP = 10


class Summary:
    """Counts requests as they pass. window: seconds over which distinct adapters are counted."""

    def __init__(self, window: float = 60.0) -> None:
        self.window = window
        self._columns = {"arrival": array("d"), "prompt_tokens": array("q"), "output_tokens": array("q")}
        self._counts: dict[str, Counter[Any]] = {name: Counter() for name in ("adapter", "rank", "slo")}
        self._windows: dict[int, set[str]] = {}
        self._seen_blocks: set[int] = set()
        self._blocks = self._shared = 0

    def watch(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """The same requests, counted."""
        for request in requests:
            for name, column in self._columns.items():
                column.append(getattr(request, name))
            for name, counts in self._counts.items():
                counts[getattr(request, name)] += 1
            if request.adapter is not None:
                self._windows.setdefault(int(request.arrival // self.window), set()).add(request.adapter)
            for block in request.hash_ids:
                self._shared += block in self._seen_blocks
                self._seen_blocks.add(block)
            self._blocks += len(request.hash_ids)
            yield request

    def result(self) -> dict[str, Any]:
        """Plain values.

        rate: requests per second between the first and the last. burstiness_cv: coefficient of variation of the gaps.
        shares are of all requests.
        """
        arrival, prompt, output = (np.asarray(column) for column in self._columns.values())
        total, gaps = len(arrival), np.diff(arrival)
        seconds = float(gaps.sum())
        to_adapters = [(name, count) for name, count in self._counts["adapter"].most_common() if name is not None]
        distinct = [len(names) for names in self._windows.values()]
        num_windows = int(arrival[-1] // self.window) + 1 if total else 0
        return {
            "requests": total,
            "seconds": seconds,
            "rate": len(gaps) / seconds if seconds else None,
            "burstiness_cv": float(gaps.std() / gaps.mean()) if seconds else None,
            "prompt_tokens": _spread(prompt),
            "output_tokens": _spread(output),
            "adapters": len(to_adapters),
            "base_share": self._counts["adapter"][None] / total if total else 0.0,
            "top_adapters": {name: count / total for name, count in to_adapters[:_TOP]},
            "distinct_adapters_per_window": {
                "window_seconds": self.window,
                "mean": sum(distinct) / num_windows if num_windows else 0.0,
                "most": max(distinct, default=0),
            },
            "ranks": _shares(self._counts["rank"], total),
            "slo": _shares(self._counts["slo"], total),
            "repeated_prefix_blocks": self._shared / self._blocks if self._blocks else None,
        }


def table(result: dict[str, Any]) -> str:
    """The summary for people."""

    def shares(found: dict[str, float]) -> str:
        return ", ".join(f"{name} {share:.1%}" for name, share in found.items())

    window, base, prefixes = (
        result[key] for key in ("distinct_adapters_per_window", "base_share", "repeated_prefix_blocks")
    )
    rows = {"requests": f"{result['requests']:,} in {result['seconds']:,.1f} s"}
    if result["rate"]:
        rows["rate"] = f"{result['rate']:.2f} req/s, CV {result['burstiness_cv']:.2f} of the gaps"
    for name in ("prompt_tokens", "output_tokens"):
        if found := result[name]:
            marks = ", ".join(f"{mark} {value}" for mark, value in found.items() if mark != "mean")
            rows[name.replace("_", " ")] = f"mean {found['mean']:.1f}, {marks}"
    rows["adapters"] = f"{result['adapters']:,}, {base:.1%} of the requests to the base model"
    rows[f"in {window['window_seconds']:g} s"] = f"{window['mean']:.1f} adapters on average, {window['most']} at most"
    rows |= {name: shares(result[key]) for name, key in (("top", "top_adapters"), ("ranks", "ranks"), ("slo", "slo"))
             if result[key] and list(result[key]) != ["unknown"]}  # fmt: skip
    if prefixes is not None:
        rows["prefix blocks"] = f"{prefixes:.1%} seen before"
    return "\n".join(f"{name:<14} {text}" for name, text in rows.items())


def _shares(counts: Counter[Any], total: int) -> dict[str, float]:
    """Share of each key; of None last, as unknown."""
    keys = sorted(counts, key=lambda key: (key is None, key))
    return {"unknown" if key is None else str(key): counts[key] / total for key in keys}


def _spread(values: np.ndarray) -> dict[str, float] | None:
    """Mean and percentiles: the smallest value that so many do not exceed."""
    if not len(values):
        return None
    marks = np.percentile(values, _PERCENTILES, method="inverted_cdf").tolist()
    named = {f"p{percent}": mark for percent, mark in zip(_PERCENTILES, marks, strict=True)}
    return {"mean": float(values.mean()), **named, "most": int(values.max())}
