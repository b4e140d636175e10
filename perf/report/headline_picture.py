"""The picture of measurements on README's first screen, for light and for dark pages.

Tests: tests/perf/report/test_headlines.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

INK = {"light": "#1c1e21", "dark": "#e6e8eb"}
_COLOUR, _GOAL = "#2f7dd1", "#d9822b"
_PART_SIZE = 2.5, 2.7
"""Inches."""


class Bars(NamedTuple):
    """A part of the picture: a bar for each number."""

    title: str
    unit: str
    bars: Sequence[tuple[str, float]]
    goal: float | None = None
    """A line that the bars should stay below."""


def draw(parts: Sequence[Bars], told: str, pictures: Path) -> None:
    """Write `measured-light.svg` and `measured-dark.svg`. told: kept in them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    for mode, ink in INK.items():
        style: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": "measured",
            "font.family": "sans-serif",
            "font.size": 8,
            "axes.titlesize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": ink,
            "axes.labelcolor": ink,
            "axes.titlecolor": ink,
            "text.color": ink,
            "xtick.color": ink,
            "ytick.color": ink,
            "legend.frameon": False,
        }
        with rc_context(style):
            width, height = _PART_SIZE
            figure = Figure((width * len(parts), height), layout="constrained")
            for axis, part in zip(figure.subplots(1, len(parts), squeeze=False).ravel(), parts, strict=True):
                _draw_part(axis, part)
            meta = {"Date": None, "Creator": None, "Format": None, "Type": None, "Description": told}
            figure.savefig(pictures / f"measured-{mode}.svg", format="svg", transparent=True, metadata=meta)


def _draw_part(axis: Any, part: Bars) -> None:
    names, values = zip(*part.bars, strict=True)
    bars = axis.bar(names, values, color=_COLOUR, width=0.6)
    axis.bar_label(bars, [f"{value:.3g}" for value in values], padding=1, fontsize=8)
    if part.goal is not None:
        axis.axhline(part.goal, color=_GOAL, ls="--", lw=1)
    axis.set(title=part.title, ylabel=part.unit)
    axis.margins(y=0.15)
