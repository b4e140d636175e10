"""Charts as SVG for a page: lines with intervals, in the page's own colours, which differ in light and dark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 28, 40
NUM_COLOURS = 6

Point = tuple[float, float]


@dataclass
class Chart:
    """x, y: labels of the axes. x_range, y_range: first and last value. log: of x."""

    title: str
    x: str
    y: str
    x_range: Point
    y_range: Point
    log: bool = False

    def __post_init__(self) -> None:
        self._marks: list[str] = []
        self._names: list[tuple[int, str]] = []

    def line(self, name: str, points: Sequence[Point], colour: int = 0, *, steps: bool = False) -> None:
        """Points from left to right; an empty name has no entry in the legend."""
        if steps:
            points = [each for (x, y), (after, _) in itertools.pairwise(points) for each in ((x, y), (after, y))]
        self._marks.append(f'<polyline class="line c{colour % NUM_COLOURS}" points="{self._path(points)}"/>')
        if name:
            self._names.append((colour % NUM_COLOURS, name))

    def band(self, low: Sequence[Point], high: Sequence[Point], colour: int = 0) -> None:
        """The area between two lines."""
        path = self._path([*low, *reversed(high)])
        self._marks.append(f'<polygon class="band c{colour % NUM_COLOURS}" points="{path}"/>')

    def whisker(self, x: float, low: float, high: float, middle: float, colour: int = 0) -> None:
        """A value with its interval."""
        across, kind = self._x(x), f"c{colour % NUM_COLOURS}"
        self._marks.append(
            f'<line class="line {kind}" x1="{across:.1f}" x2="{across:.1f}" y1="{self._y(low):.1f}" '
            f'y2="{self._y(high):.1f}"/><circle class="dot {kind}" cx="{across:.1f}" cy="{self._y(middle):.1f}" r="3"/>'
        )

    def limit(self, text: str, *, x: float | None = None, y: float | None = None) -> None:
        """A dashed line across, at a value of one of the axes."""
        first, last = (self.x_range, self.y_range)
        ends = [(x, last[0]), (x, last[1])] if x is not None else [(first[0], y or 0.0), (first[1], y or 0.0)]
        (x1, y1), (x2, y2) = ((self._x(a), self._y(b)) for a, b in ends)
        self._marks.append(f'<line class="limit" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
        place = (x1 + 4, y1 - 4, "start") if x is None else (x1 - 4, y2 + 20, "end")
        self._marks.append(
            f'<text class="small" x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="{place[2]}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 16 * len(self._names)}" role="img" aria-label="{escape(self.title)}">'
            f'<text class="title" x="{LEFT}" y="16">{escape(self.title)}</text>'
            f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
            f'<text class="small" x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(self.x)}</text>'
            f'<text class="small" x="{LEFT}" y="{TOP - 2}" text-anchor="end">{escape(self.y)}</text>'
        ]
        parts += [
            f'<text class="small" x="{self._x(value):.1f}" y="{bottom + 15}" text-anchor="middle">{value:g}</text>'
            for value in (log_ticks if self.log else ticks)(*self.x_range)
        ]
        for value in ticks(*self.y_range):
            across = self._y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {across:.1f}H{right}"/>')
            parts.append(f'<text class="small" x="{LEFT - 6}" y="{across + 4:.1f}" text-anchor="end">{value:g}</text>')
        parts += self._marks
        for place, (colour, name) in enumerate(self._names):
            height = HEIGHT + 16 * place + 6
            parts.append(f'<line class="line c{colour}" x1="{LEFT}" x2="{LEFT + 18}" y1="{height}" y2="{height}"/>')
            parts.append(f'<text class="small" x="{LEFT + 24}" y="{height + 4}">{escape(name)}</text>')
        return f"{''.join(parts)}</svg>"

    def _path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)

    def _x(self, value: float) -> float:
        first, last = self.x_range
        if self.log:
            first, last, value = math.log(first), math.log(last), math.log(max(value, first))
        return LEFT + (WIDTH - RIGHT - LEFT) * min(1.0, max(0.0, (value - first) / (last - first)))

    def _y(self, value: float) -> float:
        first, last = self.y_range
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(1.0, max(0.0, (value - first) / (last - first)))


def ticks(first: float, last: float, most: int = 6) -> list[float]:
    """Round values from the first to the last, at most so many."""
    step = 10 ** math.floor(math.log10((last - first) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (last - first) / (step * factor) <= most)
    return [
        round(step * index, 10) for index in range(math.ceil(first / step), math.floor(last / step * (1 + 1e-9)) + 1)
    ]


def log_ticks(first: float, last: float) -> list[float]:
    """1, 2 and 5 of each decade, or 1 alone of many decades."""
    decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    factors = (1, 2, 5) if last / first <= 1e3 else (1,)
    return [value for decade in decades for factor in factors if first <= (value := factor * 10.0**decade) <= last]
