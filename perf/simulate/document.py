"""The results of studies as Markdown: the command's output, and the files of perf/results/studies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from os.path import commonprefix

from .metrics import METRICS
from .results import Results, Spread, Strip, Verdict, interval
from .study import Row

_FOOT = """
A number in brackets was published. An order that holds in fewer than {share:.0%} of the seeds is struck out. Rows of
one seed have the same requests, so "apart by" is the median of the seeds' own differences. Orders by load, replicas and
so on are those of the study's quick size.
"""


def document(results: Sequence[Results], flags: str, share: float) -> str:
    """Return the page. flags: of the command that made these. share: of seeds in which an order must hold."""
    lines = [line for each in results for line in _study(each, flags, share)]
    return "\n".join(lines) + "\n" + _FOOT.format(share=share)


def _study(results: Results, flags: str, share: float) -> Iterator[str]:
    study = results.study
    yield f"# {study.name}\n\n`chorus simulate {study.name}{flags}`\n"
    yield f"{study.title}. Published: {study.source}.\n"
    yield f"{study.why.strip()}\n"
    labels = [METRICS[metric].label for metric in study.metrics]
    yield from markdown_table(["", *labels], ([row.name, *_cells(results, row)] for row in results.study.rows))
    yield f"\n{caption(results)[0].upper()}{caption(results)[1:]}.\n"
    yield from (f"* **{line}**" for line in failures(results))
    for order in results.orders:
        mark = "" if order.holds_in(share) else "~~"
        yield f"* {mark}{held_text(order)}{mark}: {order_text(order)}"
        yield from (f"  * {line}" for line in broken(order))
    for strip in results.region:
        yield ""
        heads = [f"orders by {strip.axis.name}", *(point_text(strip, point) for point, _ in strip.points)]
        yield from markdown_table(
            heads,
            (
                [order_text(same[0]), *(held_text(o) if o.holds_in(share) else f"~~{held_text(o)}~~" for o in same)]
                for same in zip(*(orders for _, orders in strip.points), strict=True)
            ),
        )


def _cells(results: Results, row: Row) -> Iterator[str]:
    for name in results.study.metrics:
        published = f" ({METRICS[name].text(row.paper[name])})" if name in row.paper else ""
        yield spread_text(name, results.spreads[row.name][name]) + published


def markdown_table(heads: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    for cells in [heads, ["---"] * len(heads), *rows]:
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def failures(results: Results) -> Iterator[str]:
    """Return a line for each row in which requests failed."""
    for row, (failed, requests) in results.failed.items():
        yield f"{row}: {failed:,} of {requests:,} requests were refused or failed, and are in no metric but within SLO"


def caption(results: Results) -> str:
    """Return the text of a table cell."""
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


def held_text(verdict: Verdict) -> str:
    return f"{verdict.held} of {verdict.seeds}"


def order_text(verdict: Verdict) -> str:
    order = verdict.order
    group, names = _names(order.rows)
    between = f" < {1 + order.within:g} x " if order.within else " < "
    first, *others = names.values()
    if order.least:
        rows = f"{first}{between}each of {', '.join(others)}"
    elif order.most:
        rows = f"each of {', '.join(others)}{between}{first}"
    else:
        rows = between.join(names.values())
    return f"{METRICS[order.metric].label}{group and f' ({group})'}: {rows}"


def broken(verdict: Verdict) -> Iterator[str]:
    """Return a line for each pair of rows that does not come in order in every seed."""
    _, names = _names(verdict.order.rows)
    for pair in verdict.pairs:
        if pair.held < verdict.seeds:
            yield (
                f"{names[pair.low]} < {names[pair.high]} in {pair.held} of {verdict.seeds}, "
                f"apart by {spread_text(verdict.order.metric, pair.gap)}"
            )


def _names(rows: list[str]) -> tuple[str, dict[str, str]]:
    """Return the first part of each row's name, up to a colon or comma, and the rest."""
    shared = commonprefix(rows)  # noqa: RUF071  of names, not of paths
    end = max(shared.rfind(": "), shared.rfind(", "))
    return shared[: max(0, end)], {name: name[end + 2 :] if end > 0 else name for name in rows}


def point_text(strip: Strip, point: object) -> str:
    return f"x {point:g}" if strip.axis.factors else str(point)
