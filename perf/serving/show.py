"""Tables of a load's result, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ..report.table import Table, shown

#: Models that are shown one by one; the first has the most requests.
_MODELS = 20
_LATENCIES = (
    ("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("end to end", "e2e_ms"),
    ("waited in the client", "client_delay_ms"),
)  # fmt: skip
_MARKS = ("mean", "p50", "p90", "p99", "max")


def show(console: Console, result: dict[str, Any]) -> None:
    """Tables of all and per model, then what else there is to say."""
    _latencies(result["load"]).show(console)
    _models(result["load"]).show(console)
    for line in _lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _latencies(load: dict[str, Any]) -> Table:
    table = Table("from the scheduled arrival", ["ms", *_MARKS])
    for title, key in _LATENCIES:
        if load[key] is not None:
            table.add(title, *(load[key][mark] for mark in _MARKS))
    return table


def _models(load: dict[str, Any]) -> Table:
    """The most used models, most used first."""
    ranked = sorted(load["models"].items(), key=lambda item: -item[1]["requests"])
    attained = "slo_attainment" in load
    columns = ["requests", "errors", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"]
    more = f" ({len(ranked) - _MODELS} more in the JSON)" if len(ranked) > _MODELS else ""
    table = Table(f"by model{more}", ["model", *columns, *(["SLO met, %"] if attained else [])])
    for name, part in [("all", load), *ranked[:_MODELS]]:
        times = [part[key] and part[key][mark] for key in ("ttft_ms", "tpot_ms") for mark in ("p50", "p99")]
        share = [100 * part["slo_attainment"]["all"]] if attained else []
        failed = part["requests"] - part["completed"]
        table.add(name, part["requests"], failed, part["output_tokens_per_second"], *times, *share)
    return table


def _lines(result: dict[str, Any]) -> Iterator[str]:
    load, client = result["load"], result["client"]
    yield (
        f"{load['completed']} of {load['requests']} requests in {load['seconds']:.1f} s: "
        f"{load['requests_per_second']:.2f} requests/s, {load['output_tokens_per_second']:.1f} output tokens/s, "
        f"{load['total_tokens_per_second']:.1f} tokens/s in all"
    )
    if "slo_attainment" in load:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in load["slo_attainment"].items())
        yield f"objectives met: {shares}; goodput {load['goodput_requests_per_second']:.2f} requests/s"
    if load["errors"]:
        yield "errors: " + ", ".join(f"{count} of {kind}" for kind, count in load["errors"].items())
        yield from (f"  {kind}: {detail}" for kind, detail in result["error_details"].items())
    if (answers := result["answers"]) and answers["checked"]:
        yield (
            f"answers: {answers['accuracy']:.1%} of {answers['checked']} exact, {answers['cross_talk']} were another "
            "adapter's"
        )
        yield from (f"  {case}" for case in answers["crossed"])
    if load["uncounted"]:
        yield f"{load['uncounted']} answers came without the server's count of tokens; their chunks were counted"
    lag = client["loop_lag_ms"]
    cost = f", {client['cpu_us_per_chunk']:.0f} µs of processor per chunk" if client["cpu_us_per_chunk"] else ""
    yield f"client: {client['cpu_share']:.0%} of a processor{cost}, timers late by p99 {shown(lag and lag['p99'])} ms"
    yield from (f"warning: {text}" for text in client["warnings"])
