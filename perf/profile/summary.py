"""Summary of a profiled load: time by part of the budget, beside its floor, and the gaps between kernels.

Tests: tests/perf/profile/test_summary.py
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..report.table import Table, rows_table
from .parts import Part, assign
from .trace import Step

#: Rows of the table of kernels.
_MOST_KERNELS = 12


def summarise(steps: Sequence[Step], floors: Mapping[Part, float]) -> dict[str, Any]:
    """Medians over the steps, in microseconds: the whole step, its gaps, and each part with its floor.

    Time of kernels that overlap counts once, as `Step.timeline` says. A gap counts for the part of the kernel after it:
    it is the time until that kernel could begin.
    """
    kernels: dict[Part, list[int]] = defaultdict(list)
    times: dict[Part, list[float]] = defaultdict(list)
    gaps: dict[Part, list[float]] = defaultdict(list)
    by_name: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for step in steps:
        of_part: dict[Part, list[tuple[float, float]]] = defaultdict(list)
        for (kernel, part), (_, spent, idle) in zip(assign(step), step.timeline(), strict=True):
            of_part[part].append((spent, idle))
            by_name[kernel.name, part.value] += spent  # type: ignore[assignment]
            counts[kernel.name, part.value] += 1
        for part in Part:
            found = of_part.get(part, [])
            kernels[part].append(len(found))
            times[part].append(sum(spent for spent, _ in found))
            gaps[part].append(sum(idle for _, idle in found))
    rows = [
        {
            "part": part.value,
            "kernels": median(kernels[part]),
            "us": median(times[part]),
            "gap_us": median(gaps[part]),
            "floor_us": floors.get(part),
            "over_floor": median(times[part]) / floors[part] if part in floors else None,
        }
        for part in Part
        if any(kernels[part])
    ]
    return {
        "steps": len(steps),
        "host_us": median(step.host_us for step in steps),
        "device_us": median(step.device_us for step in steps),
        "busy_us": median(step.busy_us for step in steps),
        "floor_us": sum(floors.values()),
        "replayed": median(step.in_graphs / max(1, len(step.kernels)) for step in steps),
        "parts": rows,
        "kernels": [
            {"name": name, "part": part, "us": total / len(steps), "count": counts[name, part] / len(steps)}
            for (name, part), total in by_name.most_common(_MOST_KERNELS)
        ],
    }


def tables(name: str, found: Mapping[str, Any]) -> list[Table]:
    """Tables of a load's summary."""
    title = (
        f"{name}: {found['host_us']:.0f} µs a step for the host, {found['device_us']:.0f} on the device, "
        f"{found['busy_us']:.0f} in kernels; floor {found['floor_us']:.0f}; {found['replayed']:.0%} replayed"
    )
    columns = "part | kernels | µs: us | gaps before, µs: gap_us | floor, µs: floor_us | µs/floor: over_floor"
    parts = rows_table(title, columns, found["parts"])
    columns = "kernel: name | part | a step: count | µs a step: us"
    kernels = rows_table(f"{name}: kernels", columns, ({**row, "name": row["name"][:70]} for row in found["kernels"]))
    return [parts, kernels]
