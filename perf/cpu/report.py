"""The CPU benchmark's summary as one JSON object, and as a table to read."""

from __future__ import annotations

from typing import Any

from .cpu_time import processor
from .limits import product_name
from .roofline import Bound, bound
from .rounds import Results
from .targets import targets
from .workload import CASES, Geometry, Workload

_NONE = "-"


def summarise(
    workload: Workload, results: Results, present: list[str], versions: dict[str, str], absent: dict[str, str]
) -> dict[str, Any]:
    """Everything that was found, as plain values."""
    machine = {
        value: results.best("machine", "limits", value)
        for value in (results.counted("machine", "limits") or [None])[0].values
    }
    bounds = _bounds(workload, machine)
    peers = [name for name in present if name != "chorus"]
    return {
        "processor": processor(),
        "workload": workload.to_json(),
        "contenders": versions,
        "absent": absent,
        "errors": {f"{contender} {name}": error for (contender, name), error in results.errors.items()},
        "cases": {case: _case(workload, results, present, case, bounds[case]) for case in CASES},
        "bounds": {case: _bound_values(found) for case, found in bounds.items()},
        "machine": machine,
        "overhead": {case: _medians(results, f"overhead {case}") for case in ("base", "mixed")},
        "join": _medians(results, "join"),
        "schedule": _medians(results, "schedule"),
        "repeats": {name: _repeats(results, name) for contender, name in results.samples if contender == "chorus"},
        "targets": [target.to_json() for target in targets(results, peers, bounds["base"].prefill_rate)],
    }


def table(workload: Workload, summary: dict[str, Any]) -> str:
    """The summary for people."""
    shape = workload.geometry
    lines = [
        f"{workload.requests} requests of {workload.prompt_tokens} + {workload.output_tokens} tokens, greedy; "
        f"{shape.layers} layers of {shape.hidden}, {workload.dtype}, {workload.threads} threads; "
        f"adapters of ranks {', '.join(map(str, workload.ranks))} on {', '.join(workload.targets)} projections "
        f"(one: r{workload.ranks[workload.one_adapter]})",
        "",
        _row("output tok/s", *summary["contenders"], "limit", "share"),
    ]
    for case, found in summary["cases"].items():
        rates = [_rate(found["contenders"].get(name), "rate") for name in summary["contenders"]]
        lines.append(_row(case, *rates, _number(summary["bounds"][case]["rate"]), _percent(found["share"])))
    for name, value in (("prefill tok/s", "prefill_rate"), ("decode tok/s", "decode_rate")):
        lines += ["", _row(name, *summary["contenders"], "limit", "share")]
        for case, found in summary["cases"].items():
            values = [_rate(found["contenders"].get(each), value) for each in summary["contenders"]]
            limit, own = summary["bounds"][case][value], found["contenders"].get("chorus", {}).get(value)
            lines.append(_row(case, *values, _number(limit), _percent(None if own is None else own / limit)))
    agreements = {
        f"{name} {case}": found["contenders"][name]["agreement"]
        for case, found in summary["cases"].items()
        for name in found["contenders"]
        if name != "chorus" and found["contenders"][name].get("agreement") is not None
    }
    if agreements:
        shown = "; ".join(f"{name} {share:.0%}" for name, share in agreements.items())
        lines += ["", f"requests with the very tokens of chorus: {shown}"]
    lines += ["", "* no undisturbed sample: read with care" if _any_noisy(summary) else "all rates from quiet samples"]
    lines += ["", *_machine_lines(summary), "", *_inner_lines(summary), "", *_target_lines(summary)]
    lines += [f"absent: {name}: {reason}" for name, reason in summary["absent"].items()]
    lines += [f"failed: {name}: {reason}" for name, reason in summary["errors"].items()]
    return "\n".join(lines)


def _case(workload: Workload, results: Results, present: list[str], case: str, limit: Bound) -> dict[str, Any]:
    contenders = {}
    own = results.counted("chorus", case)
    for name in present:
        counted = results.counted(name, case)
        if not counted:
            continue
        contenders[name] = {
            value: results.median(name, case, value)
            for value in ("rate", "prefill_rate", "decode_rate", "seconds", "prefill_seconds")
        }
        contenders[name] |= {
            "rates": [sample.values["rate"] for sample in counted],
            "noisy": results.is_noisy(name, case),
            "foreign": max(sample.foreign for sample in counted),
            "agreement": _agreement(own[0].values, counted[0].values) if own else None,
        }
    rate = contenders.get("chorus", {}).get("rate")
    return {"contenders": contenders, "share": None if rate is None else rate / limit.tokens_per_second}


def _agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Share of requests whose tokens are all the same."""
    pairs = list(zip(ours["tokens"], theirs["tokens"], strict=True))
    return sum(a == b for a, b in pairs) / len(pairs)


def _bounds(workload: Workload, machine: dict[str, float]) -> dict[str, Bound]:
    flops = product_rate(workload.geometry, machine) * 1e9
    return {case: bound(workload, case, machine["read"] * 1e9, flops) for case in CASES}


def product_rate(shape: Geometry, machine: dict[str, float]) -> float:
    """GFLOP/s of a layer's products one after the other, as fast as the library does each."""
    work = {product: product[0] * product[1] for product in shape.products}
    return sum(work.values()) / sum(each / machine[product_name(*product)] for product, each in work.items())


def _bound_values(found: Bound) -> dict[str, float]:
    return {
        "rate": found.tokens_per_second,
        "seconds": found.seconds,
        "prefill_seconds": found.prefill_seconds,
        "decode_seconds": found.decode_seconds,
        "prefill_gflop": found.prefill_flops / 1e9,
        "prefill_rate": found.prefill_rate,
        "step_mb": found.step_bytes / 1e6,
        "decode_rate": found.decode_rate,
    }


def _repeats(results: Results, name: str) -> dict[str, list[float]]:
    """Values of every round that counts."""
    counted = [sample.values for sample in results.counted("chorus", name)]
    numbers = [key for key, value in counted[0].items() if isinstance(value, float)]
    return {key: [values[key] for values in counted] for key in numbers}


def _medians(results: Results, name: str) -> dict[str, float]:
    counted = results.counted("chorus", name)
    return {value: results.median("chorus", name, value) for value in (counted[0].values if counted else ())}


def _machine_lines(summary: dict[str, Any]) -> list[str]:
    machine, bounds = summary["machine"], summary["bounds"]
    gemm = {
        dtype: ", ".join(
            f"M={name.rpartition('_')[2]} {rate:.0f}"
            for name, rate in machine.items()
            if name.startswith(f"gemm_{dtype}_")
        )
        for dtype in ("bfloat16", "float32")
    }
    return [
        f"machine (best of rounds): read {machine['read']:.1f} GB/s, copy {machine['copy']:.1f} GB/s (read + written)",
        f"  library GEMM GFLOP/s: bf16 {gemm['bfloat16']}; f32 {gemm['float32']}",
        "  library GEMM over uncached weights at M=8, GB/s: "
        + ", ".join(f"{name} {machine[f'stream_{name}_8']:.1f}" for name in gemm),
        f"  library GEMM of a layer's products, {summary['workload']['dtype']} GFLOP/s: " + _products(summary),
        "  limit = prefill work at the rate of those products + bytes of the decode steps at the read rate; step MB: "
        + ", ".join(f"{case} {found['step_mb']:.0f}" for case, found in bounds.items()),
        f"  so mixed / base can be at most {bounds['mixed']['rate'] / bounds['base']['rate']:.2f}, "
        f"one / base {bounds['one']['rate'] / bounds['base']['rate']:.2f}; of the prefill alone "
        f"{bounds['mixed']['prefill_rate'] / bounds['base']['prefill_rate']:.3f}",
    ]


def _products(summary: dict[str, Any]) -> str:
    shape, machine = Geometry(**summary["workload"]["geometry"]), summary["machine"]
    rates = [f"{k}→{n} {machine[product_name(k, n)]:.0f}" for k, n in dict.fromkeys(shape.products)]
    text = f"{', '.join(rates)}; together {product_rate(shape, machine):.0f}"
    bound, own = summary["bounds"]["base"], summary["cases"]["base"]["contenders"].get("chorus")
    return text if own is None else f"{text}; base prefill does {bound['prefill_gflop'] / own['prefill_seconds']:.0f}"


def _inner_lines(summary: dict[str, Any]) -> list[str]:
    lines = []
    for case, stages in summary["overhead"].items():
        if stages:
            shown = ", ".join(f"{name} {value:.0f}" for name, value in stages.items() if name != "outside")
            lines.append(f"decode step, {case}, µs: {shown}; outside forward {stages['outside']:.1%}")
    if join := summary["join"]:
        cache = "dropped from" if join["uncached"] else "possibly in"
        ms = {name: f"{join[name] * 1e3:.1f} ms" for name in ("warm", "cold", "warm_stall", "cold_stall")}
        ranks = ", ".join(f"{name} {value:.2f}" for name, value in join.items() if name[1:].isdigit())
        lines.append(
            f"request joining running ones, first token: warm {ms['warm']}, cold {ms['cold']} (file {cache} the page "
            f"cache); longest step meanwhile {ms['warm_stall']} and {ms['cold_stall']}; "
            f"cold / warm by rank: {ranks}"
        )
    if schedule := summary["schedule"]:
        lines.append("schedule() µs: " + ", ".join(f"{name} {value * 1e6:.0f}" for name, value in schedule.items()))
    return lines


def _target_lines(summary: dict[str, Any]) -> list[str]:
    words = {True: "met", False: "MISSED", None: "not measured"}
    return [
        f"{target['name']:<32} {_number(target['value'], 3):>8}  "
        f"({'≤' if target['at_most'] else '≥'} {target['goal']:g}) {words[target['met']]}"
        for target in summary["targets"]
    ]


def _row(name: str, *cells: str) -> str:
    return f"{name:<14}" + "".join(f"{cell:>12}" for cell in cells)


def _rate(found: dict[str, Any] | None, value: str) -> str:
    if not found:
        return _NONE
    return _number(found.get(value)) + ("*" if found["noisy"] else "")


def _number(value: float | None, digits: int = 1) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.0%}"


def _any_noisy(summary: dict[str, Any]) -> bool:
    return any(found["noisy"] for case in summary["cases"].values() for found in case["contenders"].values())
