"""A study's results for people: our value beside the published one."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from .metrics import METRICS
from .results import Results
from .study import Study


def print_results(results: Results, console: Console) -> None:
    study, several = results.study, results.study.seeds > 1
    console.print(f"\n[bold]{escape(study.title)}[/]")
    caption = "ours [dim](published)[/]" + (f", medians of {study.seeds} runs" if several else "")
    table = Table("", caption=caption, caption_justify="left")
    for metric in study.metrics:
        table.add_column(METRICS[metric].label, justify="right")
    for row, outcome in results.rows:
        published = {name: f" [dim]({escape(METRICS[name].text(value))})[/]" for name, value in row.paper.items()}
        cells = (METRICS[name].text(outcome.metrics[name]) + published.get(name, "") for name in study.metrics)
        table.add_row(escape(row.name), *cells)
    console.print(table)
    for order in results.orders:
        label = METRICS[order.metric].label + (f" (in {order.held} of {study.seeds} runs)" if several else "")
        wrong = "; ".join(f"{low} is not below {high}" for low, high in order.wrong)
        verdict = "[green]order holds[/]" if order.holds else "[red]order fails[/]"
        console.print(f"{verdict}  {escape(label)}: {escape(wrong or ' < '.join(order.rows))}")
    console.print(Padding(f"[dim]Published: {escape(study.source)}[/]", (1, 0, 0, 0)))
    console.print(f"[dim]Why they differ: {escape(' '.join(study.why.split()))}[/]")


def print_list(studies: list[Study], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for study in studies:
        table.add_row(f"[bold]{escape(study.name)}[/]", escape(study.title))
    console.print(table)
