"""The marks that the CPU benchmark's results are held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rounds import Results

RATE, PREFILL = "rate", "prefill_rate"


@dataclass(frozen=True)
class Target:
    """One mark: what was measured and what it should be. value is None when it could not be measured."""

    name: str
    value: float | None
    goal: float
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "goal": self.goal, "at_most": self.at_most, "met": self.met}


def targets(results: Results, peers: list[str], prefill_limit: float) -> list[Target]:
    """All marks, in the order of the report.

    peers: contenders other than chorus that ran. prefill_limit: tokens/s that base prefill could do at the library's
    rates of its products.
    """

    def against(ours: str, theirs: str, among: list[str], value: str = RATE) -> float | None:
        ratios = [results.ratio(("chorus", ours, value), (peer, theirs, value)) for peer in among]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    def own(case: str, value: str = "ratio") -> float | None:
        return results.median("chorus", f"compare {case}", value)

    slowest = results.median("chorus", "schedule", "slowest")
    prefill = results.median("chorus", "base", PREFILL)
    return [
        Target("prefill: base / best peer's base", against("base", "base_plain", peers, PREFILL), 1.05),
        Target("prefill: base / GEMM limit", None if prefill is None else prefill / prefill_limit, 0.8),
        Target("prefill: mixed / base", own("mixed", "prefill_ratio"), 0.95),
        Target("mixed / base", own("mixed"), 0.8),
        Target("one / base", own("one"), 0.85),
        Target("base / base_plain", own("base"), 0.99),
        Target("mixed / best peer's mixed", against("mixed", "mixed", peers), 2.5),
        Target("mixed / vllm's mixed", against("mixed", "mixed", [peer for peer in peers if peer == "vllm"]), 4.0),
        Target("base / best peer's base_plain", against("base", "base_plain", peers), 0.95),
        Target(
            "TTFT cold / warm",
            results.ratio(("chorus", "join", "cold"), ("chorus", "join", "warm")),
            1.15,
            at_most=True,
        ),
        Target("time outside forward, base", results.median("chorus", "overhead base", "outside"), 0.05, at_most=True),
        Target(
            "time outside forward, mixed", results.median("chorus", "overhead mixed", "outside"), 0.05, at_most=True
        ),
        Target("schedule() ms, slowest state", None if slowest is None else slowest * 1e3, 1.0, at_most=True),
    ]
