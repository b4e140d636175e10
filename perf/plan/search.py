"""The search for the cheapest candidate: the fewest replicas for each memory and policy, fewer than the best so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..simulate.results import Spread, interval, map_of
from .trial import QUANTILES, Candidate, Fleet, Outcome, run_trial


@dataclass(frozen=True)
class Tried:
    """A candidate and its outcomes by seed; not all seeds where it failed before.

    It meets the SLO where the low end of the interval of its attainment does.
    """

    candidate: Candidate
    outcomes: tuple[Outcome, ...]
    meets: bool

    @property
    def attainment(self) -> Spread:
        return Spread.of(one.attainment for one in self.outcomes)

    @property
    def stopped(self) -> bool:
        """True where its attainment is only known to be at most so much."""
        return any(one.stopped for one in self.outcomes)

    @property
    def finished(self) -> list[Outcome]:
        return [one for one in self.outcomes if not one.stopped]

    def quantile(self, name: str, share: float) -> Spread | None:
        """Of `ttft` or `tpot` in seconds; None where no trial ended."""
        index = round(share * (len(QUANTILES) - 1))
        return Spread.of(getattr(one, name)[index] for one in self.finished) if self.finished else None

    @property
    def hours(self) -> float | None:
        if not self.finished:
            return None
        return Spread.of(one.replica_seconds for one in self.finished).median / 3600

    @property
    def trouble(self) -> str:
        """What failed, in words; empty where the SLO is met."""
        if self.meets:
            return ""
        worst = min(self.outcomes, key=lambda one: one.attainment)
        if worst.stopped and worst.failed:
            return "no replica has room for some request, or for its adapter"
        if worst.stopped:
            return f"the queue grows: stopped when {1 - worst.attainment:.1%} had missed their first token's time"
        shares = {
            "TTFT missed by": worst.missed_ttft,
            "TPOT missed by": worst.missed_tpot,
            "refused or failed": worst.failed,
        }
        return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)


def search(
    fleet: Fleet,
    memories: Sequence[tuple[int, int]],
    policies: Sequence[str],
    most_replicas: int,
    seeds: int,
    jobs: int = 1,
    told: Callable[[Tried], None] = lambda tried: None,
) -> list[Tried]:
    """All that was tried. memories: (arena, host) bytes. told: called with each when it is known.

    Replicas, memory and attainment are taken to rise together: the fewest replicas are found by doubling and bisection,
    and what fails is not tried with less memory, so give the largest first. Later memories and policies are tried with
    as many as the best one needs, and with fewer only if these do.
    """
    found: list[Tried] = []
    with map_of(jobs) as mapped:
        best = most_replicas
        for (arena, host), policy in itertools.product(memories, policies):

            def meets(replicas: int, arena: int = arena, host: int = host, policy: str = policy) -> bool:
                candidate = Candidate(replicas, arena, host, policy)
                if any(not tried.meets and candidate.is_within(tried.candidate) for tried in found):
                    return False
                tried = _try(fleet, candidate, seeds, jobs, mapped)
                found.append(tried)
                told(tried)
                return tried.meets

            is_first = not any(tried.meets for tried in found)
            least = fewest(meets, best, 1 if is_first else best)
            best = least or best
    return found


def fewest(meets: Callable[[int], bool], most: int, start: int = 1) -> int | None:
    """The least number, up to `most`, that meets what larger ones do, too; None where `most` doesn't."""
    low, high, number = 0, None, min(start, most)
    while high is None or high - low > 1:
        if meets(number):
            high = number
        elif number == most:
            return None
        else:
            low = number
        number = min(2 * number, most) if high is None else (low + high) // 2
    return high


def cheapest(tried: Iterable[Tried]) -> Tried | None:
    """The fewest replicas that meet the SLO; of these the highest attainment, to a tenth of a percent, then the least
    host memory, then the largest arena, as its memory is paid for anyway, then the first.
    """
    good = [one for one in tried if one.meets]
    if not good:
        return None

    def cost(one: Tried) -> tuple[float, ...]:
        candidate = one.candidate
        return candidate.replicas, -round(one.attainment.median, 3), candidate.host, -candidate.arena

    return min(good, key=cost)


def _try(fleet: Fleet, candidate: Candidate, seeds: int, jobs: int, mapped: Callable[..., Iterable[Any]]) -> Tried:
    """Run the seeds until the low end of the interval is known to be below the SLO. It doesn't depend on `jobs`."""
    may_miss, _ = interval(seeds)
    outcomes: list[Outcome] = []
    missed = 0
    for first in range(0, seeds, jobs):
        for outcome in mapped(partial(run_trial, fleet, candidate), range(first, min(first + jobs, seeds))):
            outcomes.append(outcome)
            missed += outcome.attainment < fleet.slo.attainment
            if missed > may_miss:
                return Tried(candidate, tuple(outcomes), meets=False)
    return Tried(candidate, tuple(outcomes), meets=True)
