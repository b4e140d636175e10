"""The page of a plan: one HTML file that needs nothing else, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from ..simulate.results import Spread
from .chart import NUM_COLOURS, Chart, Point
from .plan import Plan, share, size
from .search import Tried
from .trial import QUANTILES

_BARS = 120  # intervals of the chart of arrivals

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #6a7079; --line: #d9dce1; --back: #fff; --good: #0a7d38; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa2ad; --line: #3a3f47; --back: #16181c; --good: #4cc27c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 980px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.badge { border: 1px solid currentColor; border-radius: 4px; padding: 0 .4em; font-size: .8em; color: var(--soft); }
pre { background: color-mix(in srgb, var(--ink) 7%, var(--back)); padding: .8rem; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.words { text-align: left; white-space: normal; } tr.best td { color: var(--good); font-weight: 600; }
.wide { overflow-x: auto; } .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); }
svg text { fill: var(--ink); } svg .title { font-weight: 600; font-size: 13px; }
svg .small { font-size: 11px; fill: var(--soft); }
svg .axis { stroke: var(--soft); fill: none; } svg .grid { stroke: var(--line); }
svg .line { fill: none; stroke-width: 2; } svg .band { opacity: .2; stroke: none; }
svg .limit { stroke: var(--ink); stroke-dasharray: 4 3; }
""" + "".join(
    f"svg .line.c{index} {{ stroke: {colour}; }} svg .dot.c{index}, svg .band.c{index} {{ fill: {colour}; }}\n"
    for index, colour in enumerate(("#2f7fd6", "#d9722b", "#2f9e5b", "#b04fc0", "#c9a227", "#7d8794")[:NUM_COLOURS])
)


def page(plan: Plan) -> str:
    title = f"Plan for {plan.fleet.trace.name} on {plan.fleet.profile.device}"
    command = plan.command()
    return "\n".join((
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f'<h1>{escape(title)} <span class="badge">{escape(plan.origin)}</span></h1>',
        f"<p>{escape(plan.summary())}</p>",
        f"<h2>To run it</h2><pre>{escape(command)}</pre>" if command else "",
        '<h2>Charts</h2><div class="charts">', *(chart.svg() for chart in _charts(plan)), "</div>",
        f'<h2>Candidates</h2><div class="wide">{_table(plan)}</div>',
        f"<p>Brackets: intervals over {plan.seeds} seeds, from order statistics.</p><h2>What this assumes</h2><ul>",
        *(f"<li>{escape(one)}</li>" for one in plan.assumptions()),
        f"</ul><p>Made by</p><pre>{escape(plan.made_by)}</pre></body></html>",
    ))  # fmt: skip


def _table(plan: Plan) -> str:
    heads = ("replicas", "arena", "host cache", "policy", "within SLO, %", "TTFT p50, ms", "TTFT p99, ms",
             "TPOT p50, ms", "TPOT p99, ms", plan.unit, "what failed")  # fmt: skip
    rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for one in sorted(plan.tried, key=lambda one: (not one.meets, one.candidate.replicas)):
        cells = [str(one.candidate.replicas), size(one.candidate.arena), size(one.candidate.host)]
        cells += [one.candidate.policy, ("at most " if one.stopped else "") + share(one.attainment)]
        cells += [milliseconds(one.quantile(name, at)) for name in ("ttft", "tpot") for at in (0.5, 0.99)]
        cells.append("-" if one.hours is None else f"{one.hours:.3g}")
        body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        mark = ' class="best"' if one is plan.best else ""
        rows.append(f'<tr{mark}>{body}<td class="words">{escape(one.trouble) or "nothing"}</td></tr>')
    return f"<table>{''.join(rows)}</table>"


def _charts(plan: Plan) -> Iterator[Chart]:
    yield _arrivals(plan)
    for arena, host in dict.fromkeys((one.candidate.arena, one.candidate.host) for one in plan.tried):
        mine = [one for one in plan.tried if (one.candidate.arena, one.candidate.host) == (arena, host)]
        if ended := [one for one in mine if not one.stopped]:
            yield _attainment(plan, ended)
    if plan.best is not None:
        yield _times("Time to first token", plan.best, "ttft", plan.fleet.slo.ttft)
        yield _times("Time per token", plan.best, "tpot", plan.fleet.slo.tpot)


def _arrivals(plan: Plan) -> Chart:
    requests = plan.fleet.requests().resampled(0, plan.fleet.scale)
    span = max(requests.span, 1e-3)
    counts, edges = np.histogram([one.arrival for one in requests.items], _BARS, (0, span))
    rates = counts * len(counts) / span
    chart = Chart("Arrivals", "seconds", "req/s", (0, span), (0, float(rates.max()) * 1.1))
    points = [*zip(edges[:-1].tolist(), rates.tolist(), strict=True), (span, float(rates[-1]))]
    chart.line("", points, steps=True)
    return chart


def _attainment(plan: Plan, shown: list[Tried]) -> Chart:
    """shown: candidates of one memory; their simulations ended."""
    first, target = shown[0].candidate, 100 * plan.fleet.slo.attainment
    most = max(one.candidate.replicas for one in shown)
    bottom = min(target - 1, *(100 * one.attainment.low for one in shown))
    title = f"Within SLO: arena {size(first.arena)}, host cache {size(first.host)}"
    chart = Chart(title, "replicas", "%", (0, most + 0.5), (bottom, 100.2))
    for colour, policy in enumerate(dict.fromkeys(one.candidate.policy for one in plan.tried)):
        mine = sorted((one.candidate.replicas, one.attainment) for one in shown if one.candidate.policy == policy)
        if mine:
            chart.line(policy, [(replicas, 100 * found.median) for replicas, found in mine], colour)
        for replicas, found in mine:
            chart.whisker(replicas, 100 * found.low, 100 * found.high, 100 * found.median, colour)
    chart.limit("asked for", y=target)
    return chart


def _times(title: str, best: Tried, name: str, limit: float) -> Chart:
    """The distribution over requests: the median of the seeds, and their interval."""
    rows = np.array([getattr(one, name) for one in best.finished]) * 1e3
    spreads = [Spread.of(column) for column in rows.T.tolist()]
    last = max(1.2 * float(rows.max()), 1.1e3 * limit if limit < float("inf") else 0.0, 2e-3)
    first = max(float(rows[rows > 0].min()) / 1.2, last / 1e4) if (rows > 0).any() else last / 10
    chart = Chart(f"{title} of the best candidate", "ms", "share", (first, last), (0, 1.02), log=True)

    def curve(end: str) -> list[Point]:
        return [(getattr(one, end), y) for one, y in zip(spreads, QUANTILES.tolist(), strict=True)]

    chart.band(curve("low"), curve("high"))
    chart.line("", curve("median"))
    if limit < float("inf"):
        chart.limit("SLO", x=1e3 * limit)
    return chart


def milliseconds(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    median, low, high = (1e3 * each for each in (spread.median, spread.low, spread.high))
    return f"{median:.3g}" + (f" [{low:.3g}, {high:.3g}]" if low < high else "")
