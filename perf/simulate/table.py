"""A study's results for people: our value beside the published one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from .metrics import METRICS
from .results import Results
from .study import Study


def print_results(results: Results, console: Console) -> None:
    for part in _parts(results):
        console.print(part)


def _parts(results: Results) -> Iterator[RenderableType]:
    study = results.study
    yield f"\n[bold]{escape(study.title)}[/]"
    caption = "ours [dim](published)[/]"
    if study.seeds > 1:
        caption += f", medians of {study.seeds} runs"
    table = Table(caption=caption, caption_justify="left")
    table.add_column("")
    for metric in study.metrics:
        table.add_column(METRICS[metric].label, justify="right")
    for row, outcome in results.rows:
        cells = [METRICS[name].text(outcome.metrics[name]) for name in study.metrics]
        for place, name in enumerate(study.metrics):
            if name in row.paper:
                cells[place] += f" [dim]({escape(METRICS[name].text(row.paper[name]))})[/]"
        table.add_row(escape(row.name), *cells)
    yield table
    for order in results.orders:
        label = METRICS[order.metric].label
        if study.seeds > 1:
            label += f" (in {order.held} of {study.seeds} runs)"
        if order.holds:
            yield f"[green]order holds[/]  {escape(label)}: {escape(' < '.join(order.rows))}"
        else:
            wrong = "; ".join(f"{low} is not below {high}" for low, high in order.wrong)
            yield f"[red]order fails[/]  {escape(label)}: {escape(wrong)}"
    yield Padding(f"[dim]Published: {escape(study.source)}[/]", (1, 0, 0, 0))
    yield f"[dim]Why they differ: {escape(' '.join(study.why.split()))}[/]"


def print_list(studies: list[Study], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for study in studies:
        table.add_row(f"[bold]{escape(study.name)}[/]", escape(study.title))
    console.print(table)
