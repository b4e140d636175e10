"""Charts of a plan as one SVG, by matplotlib; its greys can be read on light pages and on dark ones."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from ..simulate.results import Spread
from .plan import Plan, size
from .search import Tried
from .trial import QUANTILES

_BARS = 120  # intervals of the chart of arrivals
_COLUMNS = 2
_GREY = "#7d8794"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "plan", "font.family": "sans-serif", "font.size": 9,
    "axes.edgecolor": _GREY, "axes.labelcolor": _GREY, "axes.titlecolor": _GREY, "axes.titlesize": "medium",
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "grid.color": _GREY, "grid.alpha": 0.3,
    "xtick.color": _GREY, "ytick.color": _GREY, "text.color": _GREY, "legend.frameon": False,
}  # fmt: skip


def charts(plan: Plan) -> str:
    """Arrivals, attainment by replicas for each memory, and both times of the best candidate: an `svg` element."""
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
    """Candidates of one arena and host cache with simulations that ended: medians of the seeds, and their intervals."""
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
    axis.set(title=f"Within SLO: arena {arena}, host cache {host}", xlabel="replicas", ylabel="%", xlim=(0, None))
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
