"""The results of studies as Markdown: the files of perf/results/studies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .metrics import METRICS
from .results import Results
from .study import Row
from .table import broken, caption, failures, held_text, order_text, point_text, spread_text

_FOOT = """
A number in brackets was published. An order that holds in fewer than {share:.0%} of the seeds is struck out. Rows of
one seed have the same requests, so "apart by" is the median of the seeds' own differences. Orders by load, replicas and
so on are those of the study's quick size.
"""


def document(results: Sequence[Results], flags: str, share: float) -> str:
    """Return the page. flags: of the command that ran these. share: of seeds in which an order has to hold."""
    lines = [line for each in results for line in _study(each, flags, share)]
    return "\n".join(lines) + "\n" + _FOOT.format(share=share)


def _study(results: Results, flags: str, share: float) -> Iterator[str]:
    study = results.study
    yield f"# {study.name}\n\n`chorus simulate {study.name}{flags}`\n"
    yield f"{study.title}. Published: {study.source}.\n"
    yield f"{study.why.strip()}\n"
    labels = [METRICS[metric].label for metric in study.metrics]
    yield from _table(["", *labels], ([row.name, *_cells(results, row)] for row, _ in results.rows))
    yield f"\n{caption(results)[0].upper()}{caption(results)[1:]}.\n"
    yield from (f"* **{line}**" for line in failures(results))
    for order in results.orders:
        mark = "" if order.holds_in(share) else "~~"
        yield f"* {mark}{held_text(order)}{mark}: {order_text(order)}"
        yield from (f"  * {line}" for line in broken(order))
    for strip in results.region:
        yield ""
        heads = [f"orders by {strip.axis.name}", *(point_text(strip, point) for point, _ in strip.points)]
        yield from _table(heads, (
            [order_text(same[0]), *(held_text(o) if o.holds_in(share) else f"~~{held_text(o)}~~" for o in same)]
            for same in zip(*(orders for _, orders in strip.points), strict=True)
        ))  # fmt: skip


def _cells(results: Results, row: Row) -> Iterator[str]:
    for name in results.study.metrics:
        published = f" ({METRICS[name].text(row.paper[name])})" if name in row.paper else ""
        yield spread_text(name, results.spreads[row.name][name]) + published


def _table(heads: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    for cells in [heads, ["---"] * len(heads), *rows]:
        yield f"| {' | '.join(cells)} |"
