"""The page of a plan: one self-contained HTML file, readable in light and dark mode.

Tests: tests/perf/plan/test_command.py
"""

from __future__ import annotations

import io
from html import escape
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ..simulate.results import Spread
from .plan import Plan, size
from .search import QUANTILES, Tried

_BARS = 120  # intervals of the chart of arrivals
_COLUMNS = 2
_GREY = "#7d8794"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "plan",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.titlecolor": _GREY,
    "axes.titlesize": "medium",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GREY,
    "grid.alpha": 0.3,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "text.color": _GREY,
    "legend.frameon": False,
}


def charts(plan: Plan) -> str:
    """Arrivals, attainment by replicas for each memory size, and both times of the best candidate: an `svg` element."""
    memories = dict.fromkeys((one.candidate.arena, one.candidate.host) for one in plan.tried if not one.stopped)
    with rc_context(_STYLE):
        count = 1 + len(memories) + 2 * (plan.best is not None)
        lines = -(-count // _COLUMNS)
        figure = Figure((4.8 * _COLUMNS, 3.2 * lines), layout="constrained")
        axes = iter(figure.subplots(lines, _COLUMNS, squeeze=False).ravel())
        _arrivals(next(axes), plan)
        for memory in memories:
            _attainment(next(axes), plan, memory)
        if plan.best is not None:
            _times(next(axes), "Time to first token", plan.best, "ttft", plan.fleet.slo.ttft)
            _times(next(axes), "Time per token", plan.best, "tpot", plan.fleet.slo.tpot)
        for axis in axes:
            axis.set_visible(False)
        text = io.StringIO()
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    return text.getvalue()[text.getvalue().index("<svg") :]


def _arrivals(axis: Any, plan: Plan) -> None:
    requests = plan.fleet.requests().resampled(0, plan.fleet.scale)
    span = max(requests.span, 1e-3)
    counts, edges = np.histogram([one.arrival for one in requests.items], _BARS, (0, span))
    axis.stairs(counts * len(counts) / span, edges)
    axis.set(title="Arrivals", xlabel="seconds", ylabel="requests/s", ylim=(0, None))


def _attainment(axis: Any, plan: Plan, memory: tuple[int, int]) -> None:
    """Candidates of one arena and host cache whose simulations ended: medians of the seeds, and their intervals."""
    for index, policy in enumerate(dict.fromkeys(one.candidate.policy for one in plan.tried)):
        mine = [one for one in plan.tried if not one.stopped and one.candidate.policy == policy]
        mine = [one for one in mine if (one.candidate.arena, one.candidate.host) == memory]
        found = sorted((one.candidate.replicas, *_percent(one.attainment)) for one in mine)
        if found:
            replicas, middle, low, high = np.array(found).T
            axis.errorbar(
                replicas, middle, (middle - low, high - middle), marker="o", ms=4, color=f"C{index}", label=policy
            )
    axis.axhline(100 * plan.fleet.slo.attainment, color=_GREY, ls="--", label="asked for")
    axis.set_ylim(top=min(axis.get_ylim()[1], 100.5))  # no share is above 100 %
    axis.xaxis.get_major_locator().set_params(integer=True)
    arena, host = map(size, memory)
    axis.set(title=f"Within SLO: page pool {arena}, host cache {host}", xlabel="replicas", ylabel="%", xlim=(0, None))
    axis.legend()


def _times(axis: Any, title: str, best: Tried, name: str, limit: float) -> None:
    """The distribution over requests: the median of the seeds, and their interval."""
    rows = np.array([getattr(one, name) for one in best.finished]) * 1e3
    spreads = [Spread.of(column) for column in rows.T.tolist()]
    middle, low, high = np.array([(one.median, one.low, one.high) for one in spreads]).T
    axis.fill_betweenx(QUANTILES, low, high, alpha=0.2, lw=0)
    axis.plot(middle, QUANTILES)
    if limit < float("inf"):
        axis.axvline(1e3 * limit, color=_GREY, ls="--", label="SLO")
        axis.legend()
    axis.set(title=f"{title} of the best candidate", xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
    if (rows > 0).any():
        axis.set_xscale("log", subs=())
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")


def _percent(spread: Spread) -> tuple[float, float, float]:
    return 100 * spread.median, 100 * spread.low, 100 * spread.high


_PAGE_STYLE = """
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
    return "\n".join(
        (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_PAGE_STYLE}</style></head><body>',
            f'<h1>{escape(title)} <span class="badge">{escape(plan.origin)}</span></h1>',
            f"<p>{escape(plan.summary())}</p>",
            f"<h2>To run it</h2><pre>{escape(command)}</pre>" if command else "",
            f"<h2>Charts</h2>{charts(plan)}",
            f'<h2>Candidates</h2><div class="wide">{_table(plan)}</div>',
            f"<p>Brackets: intervals over {plan.seeds} seeds, from order statistics.</p><h2>What this assumes</h2><ul>",
            *(f"<li>{escape(one)}</li>" for one in plan.assumptions()),
            f"</ul><p>Made by</p><pre>{escape(plan.made_by)}</pre></body></html>",
        )
    )


def _table(plan: Plan) -> str:
    heads = (
        "replicas",
        "page pool",
        "host cache",
        "policy",
        "what failed",
        "within SLO, %",
        "TTFT p50, ms",
        "TTFT p99, ms",
        "TPOT p50, ms",
        "TPOT p99, ms",
        plan.unit,
    )
    rows = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for one in sorted(plan.tried, key=lambda one: (not one.meets, one.candidate.replicas)):
        named = [str(one.candidate.replicas), size(one.candidate.arena), size(one.candidate.host), one.candidate.policy]
        cells = [("at most " if one.stopped else "") + one.attainment.text(100, ".2f")]
        spreads = (one.quantile(name, at) for name in ("ttft", "tpot") for at in (0.5, 0.99))
        cells += ["-" if spread is None else spread.text(1e3, ".3g") for spread in spreads]
        cells.append("-" if one.hours is None else f"{one.hours:.3g}")
        mark = ' class="best"' if one is plan.best else ""
        failed = f'<td class="words">{escape(one.trouble) or "nothing"}</td>'
        rows.append(f"<tr{mark}>{''.join(map(_cell, named))}{failed}{''.join(map(_cell, cells))}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _cell(text: str) -> str:
    """A value, with its interval below it."""
    value, bracket, ends = escape(text).partition(" [")
    return f"<td>{value}{f'<small>[{ends}</small>' if bracket else ''}</td>"
