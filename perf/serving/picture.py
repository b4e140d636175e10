"""One run as a picture: distributions of the latencies, and rate and latency over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .record import Record
from .summary import Objectives, duration

_BINS = 60


def draw(records: Sequence[Record], objectives: Objectives, title: str, path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure  # which needs no display

    done = [record for record in records if record.ok]
    figure = Figure(figsize=(13, 8), layout="constrained")
    figure.suptitle(title)
    first, second, third = figure.subplots(2, 3)[0]
    for axes, name, values, limit in (
        (first, "TTFT", [record.ttft for record in done], objectives.ttft),
        (second, "ITL", [gap for record in done for gap in record.itl], None),
        (third, "end to end", [record.e2e for record in done], objectives.e2e),
    ):
        if ms := [1e3 * value for value in values]:
            axes.ecdf(ms)
            axes.set_xscale("log" if max(ms) > 20 * min(ms) > 0 else "linear")
        axes.set(xlabel=f"{name}, ms", ylabel="share of gaps" if name == "ITL" else "share of requests")
        axes.grid(alpha=0.3)
        if limit is not None:
            axes.axvline(limit, color="tab:red", linestyle="--", label="objective")
            axes.legend()
    rates, tokens, latencies = figure.axes[3:]
    _timeline(rates, tokens, records, done)
    _latencies(latencies, done)
    figure.savefig(path, dpi=110)


def _timeline(rates: Any, tokens: Any, records: Sequence[Record], done: Sequence[Record]) -> None:
    """Arrivals and completions per second, and output tokens per second."""
    edges = np.linspace(0, max(duration(records), 1e-3), _BINS + 1)
    width, centres = edges[1] - edges[0], (edges[1:] + edges[:-1]) / 2
    for label, times in (
        ("arrivals", [record.scheduled for record in records]),
        ("completions", [record.ended for record in done]),
        ("errors", [record.ended for record in records if not record.ok]),
    ):
        if times or label != "errors":
            rates.step(centres, np.histogram(times, edges)[0] / width, where="mid", label=label)
    rates.set(xlabel="time, s", ylabel="requests/s")
    rates.legend()
    times = [time for record in done for time in record.token_times]
    weights = [record.output_tokens / len(record.token_times) for record in done for _ in record.token_times]
    tokens.step(centres, np.histogram(times, edges, weights=weights)[0] / width, where="mid")
    tokens.set(xlabel="time, s", ylabel="output tokens/s")


def _latencies(axes: Any, done: Sequence[Record]) -> None:
    at = [record.scheduled for record in done]
    for label, values in (("end to end", [r.e2e for r in done]), ("TTFT", [r.ttft for r in done])):
        axes.scatter(at, np.asarray(values) * 1e3, s=4, label=label)
    if done:
        axes.set_yscale("log")
        axes.legend()
    axes.set(xlabel="scheduled arrival, s", ylabel="ms")
