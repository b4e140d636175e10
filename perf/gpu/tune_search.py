"""Search for a bucket's fastest schedule: from the rules' on, one field after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...ops.schedule_check import check_schedule
from ...ops.sgmv_schedule import Kind, Schedule, decode, prefill

#: Least share of the rules' time that a schedule must save to be kept: less is noise.
LEAST_GAIN = 0.02

#: Values that are tried of each field, in this order; warps first, as they bound how large blocks may be.
OPTIONS: Mapping[Kind, Mapping[str, tuple[int, ...]]] = {
    "decode": {
        "warps": (2, 4, 8),
        "block_k": (128, 256, 512),
        "max_splits": (8, 16, 32),
        "block_r": (8, 16, 32),
        "lanes": (1, 2, 4),
        "block_n": (128, 256, 512),
        "expand_r": (8, 16, 32),
    },
    "prefill": {
        "warps": (4, 8),
        "tile_tokens": (32, 64, 128),
        "block_r": (16, 32, 64),
        "block_k": (32, 64, 128),
        "max_splits": (1, 2, 4, 8),
        "stages": (2, 3, 4),
        "block_n": (64, 128, 256),
        "expand_r": (16, 32, 64),
    },
}


class Unfit(RuntimeError):
    """A schedule that must not be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Key of a table's entry; see `ops.schedule_table.Entry`."""

    kind: Kind
    tokens: int
    max_rank: int
    itemsize: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.tokens}-{self.max_rank}-{self.itemsize}"

    def rule(self) -> Schedule:
        if self.kind == "decode":
            return decode(self.tokens, self.max_rank)
        return prefill(self.tokens, self.max_rank, self.itemsize)


@dataclass(frozen=True, slots=True)
class Found:
    """A bucket's schedule, its microseconds per layer and those of the rules', and what was left out, with reasons."""

    bucket: Bucket
    schedule: Schedule
    us: float
    rule_us: float
    unfit: tuple[str, ...]

    def entry(self) -> dict[str, Any]:
        """As in the table's file."""
        return {
            **asdict(self.bucket), "us": self.us, "rule_us": self.rule_us, "schedule": asdict(self.schedule)
        }  # fmt: skip


def candidates(bucket: Bucket, schedule: Schedule, name: str) -> Iterator[Schedule]:
    """The schedule with other values of a field, where those make one that a table may name."""
    for value in OPTIONS[bucket.kind][name]:
        changed = replace(schedule, **{name: value})
        most = -(-bucket.max_rank // changed.block_r)  # as many lanes as there are blocks of rank-rows, or fewer
        if name == "block_r":
            changed = replace(changed, lanes=most if changed.tensor_cores else min(changed.lanes, most))
        try:
            check_schedule(changed, bucket.max_rank, bucket.itemsize)
        except ValueError:
            continue
        if changed != schedule:
            yield changed


def search(bucket: Bucket, measure: Callable[[Bucket, Schedule], float]) -> Found:
    """The schedule of the least time; the rules' where it gains less than LEAST_GAIN when both are measured again.

    measure: microseconds per layer. Where it raises Unfit, a candidate is left out; for the rules' it is raised.
    """
    best = rule = bucket.rule()
    least = rule_us = measure(bucket, rule)
    unfit = []
    for name in OPTIONS[bucket.kind]:
        for candidate in list(candidates(bucket, best, name)):
            try:
                us = measure(bucket, candidate)
            except Unfit as error:
                unfit.append(f"{candidate}: {error}")
                continue
            if us < least:
                best, least = candidate, us
    if best != rule:  # the least of many times is least by luck, too
        rule_us, least = measure(bucket, rule), measure(bucket, best)
        if least > (1 - LEAST_GAIN) * rule_us:
            best, least = rule, rule_us
    return Found(bucket, best, least, rule_us, tuple(unfit))
