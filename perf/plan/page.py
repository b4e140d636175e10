"""The page of a plan: one HTML file that needs nothing else, readable in light and dark."""

from __future__ import annotations

from html import escape

from ..simulate.results import Spread
from .chart import charts
from .plan import Plan, share, size

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #6a7079; --line: #d9dce1; --back: #fff; --good: #0a7d38; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa2ad; --line: #3a3f47; --back: #16181c; --good: #4cc27c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 980px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.badge { border: 1px solid currentColor; border-radius: 4px; padding: 0 .4em; font-size: .8em; color: var(--soft); }
pre { background: color-mix(in srgb, var(--ink) 7%, var(--back)); padding: .8rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { text-align: right; padding: .2rem .4rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; } td small { display: block; color: var(--soft); font-weight: 400; }
td.words { text-align: left; white-space: normal; min-width: 11em; }
tr.best td { color: var(--good); font-weight: 600; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
"""


def page(plan: Plan) -> str:
    title = f"Plan for {plan.fleet.trace.name} on {plan.fleet.profile.device}"
    command = plan.command()
    return "\n".join((
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f'<h1>{escape(title)} <span class="badge">{escape(plan.origin)}</span></h1>',
        f"<p>{escape(plan.summary())}</p>",
        f"<h2>To run it</h2><pre>{escape(command)}</pre>" if command else "",
        f"<h2>Charts</h2>{charts(plan)}",
        f'<h2>Candidates</h2><div class="wide">{_table(plan)}</div>',
        f"<p>Brackets: intervals over {plan.seeds} seeds, from order statistics.</p><h2>What this assumes</h2><ul>",
        *(f"<li>{escape(one)}</li>" for one in plan.assumptions()),
        f"</ul><p>Made by</p><pre>{escape(plan.made_by)}</pre></body></html>",
    ))  # fmt: skip


def _table(plan: Plan) -> str:
    heads = ("replicas", "arena", "host cache", "policy", "what failed", "within SLO, %", "TTFT p50, ms",
             "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms", plan.unit)  # fmt: skip
    rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for one in sorted(plan.tried, key=lambda one: (not one.meets, one.candidate.replicas)):
        named = [str(one.candidate.replicas), size(one.candidate.arena), size(one.candidate.host), one.candidate.policy]
        cells = [("at most " if one.stopped else "") + share(one.attainment)]
        cells += [milliseconds(one.quantile(name, at)) for name in ("ttft", "tpot") for at in (0.5, 0.99)]
        cells.append("-" if one.hours is None else f"{one.hours:.3g}")
        mark = ' class="best"' if one is plan.best else ""
        failed = f'<td class="words">{escape(one.trouble) or "nothing"}</td>'
        rows.append(f"<tr{mark}>{''.join(map(_cell, named))}{failed}{''.join(map(_cell, cells))}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _cell(text: str) -> str:
    """A value, with its interval below it."""
    value, bracket, ends = escape(text).partition(" [")
    return f"<td>{value}{f'<small>[{ends}</small>' if bracket else ''}</td>"


def milliseconds(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    median, low, high = (1e3 * each for each in (spread.median, spread.low, spread.high))
    return f"{median:.3g}" + (f" [{low:.3g}, {high:.3g}]" if low < high else "")
