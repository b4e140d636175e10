"""Pictures of a study's results. Needs matplotlib: `pip install 'chorus-lora[plots]'`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .metrics import METRICS
from .results import Results
from .study import StudyError


def write_plot(results: Results, directory: Path) -> Path:
    """Medians with their intervals beside the published values. Raises StudyError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise StudyError("plots need matplotlib; install it with: pip install 'chorus-lora[plots]'") from None
    figure, rows = Figure(layout="constrained"), results.study.rows
    metrics = results.study.metrics
    columns = min(3, len(metrics))
    lines = -(-len(metrics) // columns)
    figure.set_size_inches(4 * columns, (0.22 * len(rows) + 0.8) * lines)
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    places = np.arange(len(rows))
    for axis, name in zip(axes, metrics, strict=False):
        metric = METRICS[name]
        spreads = [results.spreads[row.name][name].to_json() for row in rows]
        middle, low, high = metric.scale * np.array(spreads).T
        axis.errorbar(middle, places, xerr=(middle - low, high - middle), fmt="o", ms=4, label="ours")
        told = [(place, row.paper[name] * metric.scale)
                for place, row in enumerate(rows) if isinstance(row.paper.get(name), float)]  # fmt: skip
        if told:
            axis.plot([value for _, value in told], [place for place, _ in told], "x", label="published")
            axis.legend(fontsize="small")
        axis.set_title(metric.label, fontsize="medium")
        axis.set_yticks(places, [row.name for row in rows], fontsize="small")
        axis.grid(alpha=0.3)
    for axis in axes[len(metrics) :]:
        axis.set_visible(False)
    axes[0].invert_yaxis()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{results.study.name}.png"
    figure.savefig(path, dpi=120)
    return path
