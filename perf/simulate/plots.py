"""Pictures of a study's results. Needs matplotlib: `pip install 'chorus-lora[plots]'`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .metrics import METRICS
from .results import Results
from .serving import LOOK
from .study import StudyError

_CDFS = {"ttft": "TTFT, s", "time_per_token": "time per token, s"}


def write_plots(results: Results, directory: Path) -> list[Path]:
    """Medians with their intervals beside the published values, CDFs over requests, requests per replica over time.

    Raises StudyError.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise StudyError("plots need matplotlib; install it with: pip install 'chorus-lora[plots]'") from None
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, draw in (("rows", _rows), ("cdf", _cdfs), ("load", _loads)):
        figure = Figure(layout="constrained")
        if draw(results, figure):
            path = directory / f"{results.study.name}-{kind}.png"
            figure.savefig(path, dpi=120)
            written.append(path)
    return written


def _rows(results: Results, figure: Any) -> bool:
    metrics = results.study.metrics
    columns = min(3, len(metrics))
    lines = -(-len(metrics) // columns)
    figure.set_size_inches(4 * columns, (0.22 * len(results.rows) + 0.8) * lines)
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    places = np.arange(len(results.rows))
    for axis, name in zip(axes, metrics, strict=False):
        metric = METRICS[name]
        spreads = [results.spreads[row.name][name].to_json() for row, _ in results.rows]
        middle, low, high = metric.scale * np.array(spreads).T
        axis.errorbar(middle, places, xerr=(middle - low, high - middle), fmt="o", ms=4, label="ours")
        told = [(place, row.paper[name] * metric.scale)
                for place, (row, _) in enumerate(results.rows) if isinstance(row.paper.get(name), float)]  # fmt: skip
        if told:
            axis.plot([value for _, value in told], [place for place, _ in told], "x", label="published")
            axis.legend(fontsize="small")
        axis.set_title(metric.label, fontsize="medium")
        axis.set_yticks(places, [row.name for row, _ in results.rows], fontsize="small")
        axis.grid(alpha=0.3)
    for axis in axes[len(metrics) :]:
        axis.set_visible(False)
    axes[0].invert_yaxis()
    return True


def _cdfs(results: Results, figure: Any) -> bool:
    if not all(outcome.samples for _, outcome in results.rows):
        return False
    figure.set_size_inches(11, 4.5)
    for axis, (name, label) in zip(figure.subplots(1, len(_CDFS)), _CDFS.items(), strict=True):
        for row, outcome in results.rows:
            values = np.sort(outcome.samples[name])
            axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=row.name)
        axis.set_xlabel(label)
        axis.set_ylabel("share of requests")
        axis.set_xlim(0, 1.2 * max(np.percentile(outcome.samples[name], 99) for _, outcome in results.rows))
    axis.legend(fontsize="small")
    return True


def _loads(results: Results, figure: Any) -> bool:
    drawn = [(row, outcome.loads) for row, outcome in results.rows if outcome.loads is not None]
    if not drawn or drawn[0][1].shape[1] == 1 or len(drawn[0][1]) < 2:
        return False
    figure.set_size_inches(9, 2.2 * len(drawn))
    for axis, (row, loads) in zip(figure.subplots(len(drawn), 1, squeeze=False, sharex=True)[:, 0], drawn, strict=True):
        image = axis.imshow(
            loads.T, aspect="auto", origin="lower", extent=(0, len(loads) * LOOK, -0.5, loads.shape[1] - 0.5)
        )
        axis.set_title(f"{row.name}: requests per replica", fontsize="medium")
        axis.set_ylabel("replica")
        figure.colorbar(image, ax=axis)
    axis.set_xlabel("seconds")
    return True
