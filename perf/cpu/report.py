"""The CPU benchmark's summary as one JSON object, its marks, and tables of both."""

from __future__ import annotations

from typing import Any

from ..report.table import Goal, Table, goal_table
from .limits import product_name
from .roofline import Bound, bound
from .rounds import Results, processor
from .workload import CASES, Geometry, Workload

_RATES = {"output tok/s": "rate", "prefill tok/s": "prefill_rate", "decode tok/s": "decode_rate"}


def summarise(
    workload: Workload, results: Results, present: list[str], versions: dict[str, str], absent: dict[str, str]
) -> dict[str, Any]:
    """Everything that was found, as plain values; without bounds where the machine's limits could not be measured."""
    machine = results.values("machine", "limits", results.best)
    flops = product_rate(workload.geometry, machine) * 1e9 if machine else 0.0
    bounds = {case: bound(workload, case, machine["read"] * 1e9, flops) for case in CASES if machine}
    peers = [name for name in present if name != "chorus"]
    marks = goals(results, peers, bounds["base"].prefill_rate if bounds else None)
    return {
        "processor": processor(),
        "workload": workload.to_json(),
        "contenders": versions,
        "absent": absent,
        "errors": {f"{contender} {name}": error for (contender, name), error in results.errors.items()},
        "cases": {case: _case(results, present, case, bounds.get(case)) for case in CASES},
        "bounds": {case: found.to_json() for case, found in bounds.items()},
        "machine": machine,
        "targets": [goal.to_json() for goal in marks],
    }


def goals(results: Results, peers: list[str], prefill_limit: float | None) -> list[Goal]:
    """All marks, in the order of the report.

    peers: contenders other than chorus that ran. prefill_limit: tokens/s of base prefill with its products at the
    library's rates; None where the rates were not measured.
    """

    def against(ours: str, theirs: str, among: list[str], value: str = "rate") -> float | None:
        ratios = [results.ratio(("chorus", ours, value), (peer, theirs, value)) for peer in among]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    def own(case: str, other: str, value: str = "rate") -> float | None:
        return against(case, other, ["chorus"], value)

    prefill = results.median("chorus", "base", "prefill_rate")
    vllm = [peer for peer in peers if peer == "vllm"]
    share = None if prefill is None or prefill_limit is None else prefill / prefill_limit
    return [
        Goal("prefill: base / best peer's base", against("base", "base_plain", peers, "prefill_rate"), 1.05),
        Goal("prefill: base / GEMM limit", share, 0.8),
        Goal("prefill: mixed / base", own("mixed", "base", "prefill_rate"), 0.95),
        Goal("mixed / base", own("mixed", "base"), 0.8),
        Goal("one / base", own("one", "base"), 0.85),
        Goal("base / base_plain", own("base", "base_plain"), 0.99),
        Goal("mixed / best peer's mixed", against("mixed", "mixed", peers), 2.5),
        Goal("mixed / vllm's mixed", against("mixed", "mixed", vllm), 4.0),
        Goal("base / best peer's base_plain", against("base", "base_plain", peers), 0.95),
    ]  # fmt: skip


def show(workload: Workload, summary: dict[str, Any]) -> None:
    """Print the summary for people."""
    shape = workload.geometry
    print(
        f"{workload.requests} requests of {workload.prompt_tokens} + {workload.output_tokens} tokens, greedy; "
        f"{shape.layers} layers of {shape.hidden}, {workload.dtype}, {workload.threads} threads; "
        f"adapters of ranks {', '.join(map(str, workload.ranks))} on {', '.join(workload.targets)} projections "
        f"(one: r{workload.ranks[workload.one_adapter]})"
    )
    for title, value in _RATES.items():
        _rate_table(title, value, summary).show()
    found = [entry for case in summary["cases"].values() for entry in case["contenders"].items()]
    agreements = [
        f"{name} {case} {entry['agreement']:.0%}"
        for case, each in summary["cases"].items()
        for name, entry in each["contenders"].items()
        if name != "chorus" and entry["agreement"] is not None
    ]
    if agreements:
        print(f"requests with the very tokens of chorus: {'; '.join(agreements)}")
    noisy = any(entry["noisy"] for _, entry in found)
    print("* no undisturbed sample: read with care" if noisy else "all rates from quiet samples")
    for line in _machine_lines(summary):
        print(line)
    goal_table("goals", (Goal(*list(goal.values())[:4]) for goal in summary["targets"])).show()
    for kind, reasons in (("absent", summary["absent"]), ("failed", summary["errors"])):
        for name, reason in reasons.items():
            print(f"{kind}: {name}: {reason}")


def _rate_table(title: str, value: str, summary: dict[str, Any]) -> Table:
    table = Table(title, ["case", *summary["contenders"], "limit", "share, %"])
    for case, found in summary["cases"].items():
        limit = summary["bounds"].get(case, {}).get(value)
        own = found["contenders"].get("chorus", {}).get(value)
        cells = []
        for entry in map(found["contenders"].get, summary["contenders"]):
            rate = entry and entry[value]
            cells.append(f"{rate:.1f}*" if rate is not None and entry["noisy"] else rate)
        table.add(case, *cells, limit, None if own is None or limit is None else 100 * own / limit)
    return table


def _case(results: Results, present: list[str], case: str, limit: Bound | None) -> dict[str, Any]:
    contenders = {}
    own = results.counted("chorus", case)
    for name in present:
        if not (counted := results.counted(name, case)):
            continue
        values = ("rate", "prefill_rate", "decode_rate", "seconds", "prefill_seconds")
        contenders[name] = {value: results.median(name, case, value) for value in values} | {
            "rates": [sample.values["rate"] for sample in counted],
            "noisy": results.is_noisy(name, case),
            "foreign": max(sample.foreign for sample in counted),
            "agreement": _agreement(own[0].values, counted[0].values) if own else None,
        }
    rate = contenders.get("chorus", {}).get("rate")
    share = None if rate is None or limit is None else rate / limit.tokens_per_second
    return {"contenders": contenders, "share": share}


def _agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Share of requests with the same tokens in both."""
    pairs = list(zip(ours["tokens"], theirs["tokens"], strict=True))
    return sum(a == b for a, b in pairs) / len(pairs)


def product_rate(shape: Geometry, machine: dict[str, float]) -> float:
    """GFLOP/s of a layer's products one after the other, as fast as the library does each."""
    work = {product: product[0] * product[1] for product in shape.products}
    return sum(work.values()) / sum(each / machine[product_name(*product)] for product, each in work.items())


def _machine_lines(summary: dict[str, Any]) -> list[str]:
    machine, bounds, shape = summary["machine"], summary["bounds"], Geometry(**summary["workload"]["geometry"])
    if not machine:
        return ["machine: its limits could not be measured"]

    products = ", ".join(f"{k}→{n} {machine[product_name(k, n)]:.0f}" for k, n in dict.fromkeys(shape.products))
    own = summary["cases"]["base"]["contenders"].get("chorus")
    done = f"; base prefill does {bounds['base']['prefill_gflop'] / own['prefill_seconds']:.0f}" if own else ""
    above = {
        (case, value): bounds[case][value] / bounds["base"][value]
        for case in ("mixed", "one")
        for value in ("rate", "prefill_rate")
    }
    return [
        f"machine (best of rounds): read {machine['read']:.1f} GB/s, copy {machine['copy']:.1f} GB/s (read + written)",
        f"  library GEMM of a layer's products, {summary['workload']['dtype']} GFLOP/s: {products}; together "
        f"{product_rate(shape, machine):.0f}{done}",
        "  limit = prefill work at the rate of these products + bytes of the decode steps at the read rate; step MB: "
        + ", ".join(f"{case} {found['step_mb']:.0f}" for case, found in bounds.items()),
        f"  so mixed / base can be at most {above['mixed', 'rate']:.2f}, one / base {above['one', 'rate']:.2f}; of the "
        f"prefill alone {above['mixed', 'prefill_rate']:.3f}",
    ]
