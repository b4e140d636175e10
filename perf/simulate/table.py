"""A study's results for people: our values beside the published ones, and where each order holds."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import commonprefix

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from .metrics import METRICS, SHARE
from .results import Order, Results, Spread, Strip, interval
from .study import Study


def print_results(results: Results, console: Console, share: float = SHARE) -> None:
    """share: of seeds in which an order has to hold."""
    study = results.study
    console.print(f"\n[bold]{escape(study.title)}[/]")
    table = Table("", caption=f"ours [dim](published)[/], {caption(results)}", caption_justify="left")
    for metric in study.metrics:
        table.add_column(METRICS[metric].label, justify="right")
    for row, _ in results.rows:
        published = {name: f" [dim]({escape(METRICS[name].text(value))})[/]" for name, value in row.paper.items()}
        spreads = results.spreads[row.name]
        cells = (escape(spread_text(name, spreads[name])) + published.get(name, "") for name in study.metrics)
        table.add_row(escape(row.name), *cells)
    console.print(table)
    for line in failures(results):
        console.print(f"[red]{escape(line)}[/]")
    for order in results.orders:
        verdict = "[green]order holds[/]" if order.holds_in(share) else "[red]order fails[/]"
        console.print(f"{verdict} in {held_text(order)}  {escape(order_text(order))}")
        for line in broken(order):
            console.print(f"    [dim]{escape(line)}[/]")
    for strip in results.region:
        _print_strip(strip, console, share)
    console.print(Padding(f"[dim]Published: {escape(study.source)}[/]", (1, 0, 0, 0)))
    console.print(f"[dim]Why they differ: {escape(' '.join(study.why.split()))}[/]")


def _print_strip(strip: Strip, console: Console, share: float) -> None:
    table = Table(
        strip.axis.name, caption="seeds in which the order holds, at the study's quick size", caption_justify="left"
    )
    for point, _ in strip.points:
        table.add_column(point_text(strip, point), justify="right")
    for same in zip(*(orders for _, orders in strip.points), strict=True):
        cells = (f"[{'green' if order.holds_in(share) else 'red'}]{held_text(order)}[/]" for order in same)
        table.add_row(escape(order_text(same[0])), *cells)
    console.print(table)


def failures(results: Results) -> Iterator[str]:
    """Return a line for each row in which requests failed."""
    for row, (failed, requests) in results.failed.items():
        yield f"{row}: {failed:,} of {requests:,} requests were refused or failed, and are in no metric but within SLO"


def caption(results: Results) -> str:
    """Return what a cell of the table is."""
    count = len(results.seeds)
    if count == 1:
        return "one seed"
    rank, sure = interval(count)
    bounds = "least and largest" if rank == 0 else f"{rank + 1}. smallest and largest"
    return f"medians of {count} seeds, and the {bounds}, which enclose the median of all seeds with {sure:.1%}"


def spread_text(metric: str, spread: Spread) -> str:
    text = METRICS[metric].text
    middle, low, high = map(text, (spread.median, spread.low, spread.high))
    return middle if low == high == middle else f"{middle} [{low} to {high}]"


def held_text(order: Order) -> str:
    return f"{order.held} of {order.seeds}"


def order_text(order: Order) -> str:
    group, names = _names(order)
    between = f" < {1 + order.within:g} x " if order.within else " < "
    first, *others = names.values()
    if order.least:
        rows = f"{first}{between}each of {', '.join(others)}"
    elif order.most:
        rows = f"each of {', '.join(others)}{between}{first}"
    else:
        rows = between.join(names.values())
    return f"{METRICS[order.metric].label}{group and f' ({group})'}: {rows}"


def broken(order: Order) -> Iterator[str]:
    """Return a line for each pair of rows that does not come in order in every seed."""
    _, names = _names(order)
    for pair in order.pairs:
        if pair.held < order.seeds:
            yield (
                f"{names[pair.low]} < {names[pair.high]} in {pair.held} of {order.seeds}, "
                f"apart by {spread_text(order.metric, pair.gap)}"
            )


def _names(order: Order) -> tuple[str, dict[str, str]]:
    """Return what the names of an order's rows begin with, up to a colon or comma, and the rest of each."""
    shared = commonprefix(order.rows)  # noqa: RUF071  of names, not of paths
    end = max(shared.rfind(": "), shared.rfind(", "))
    return shared[: max(0, end)], {name: name[end + 2 :] if end > 0 else name for name in order.rows}


def point_text(strip: Strip, point: object) -> str:
    return f"x {point:g}" if strip.axis.factors else str(point)


def print_list(studies: list[Study], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for study in studies:
        table.add_row(f"[bold]{escape(study.name)}[/]", escape(study.title))
    console.print(table)
