"""The search: the fewest replicas, in few trials, and no seed more than it takes to fail."""

from __future__ import annotations

import math
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.perf.plan import search as module
from chorus.perf.plan.requests import Slo
from chorus.perf.plan.search import Candidate, Outcome, Tried, cheapest, fewest, search

GIB = 1 << 30


@settings(max_examples=30)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 80))
def test_the_fewest_are_found_in_few_trials(needed, most, start):
    asked = []

    def meets(number):
        asked.append(number)
        return number >= needed

    assert fewest(meets, most, start) == (needed if needed <= most else None)
    assert len(asked) == len(set(asked)) <= 2 + 2 * math.log2(most)
    assert all(1 <= number <= most for number in asked)


def outcome(attainment):
    return Outcome(
        attainment, missed_ttft=1 - attainment, replica_seconds=3600.0, ttft=(0.1,) * 101, tpot=(0.01,) * 101
    )


def run(monkeypatch, attainment, jobs=1, seeds=5):
    """attainment: of a candidate and a seed."""
    asked = []

    def trial(fleet, candidate, seed):
        asked.append((candidate, seed))
        return outcome(attainment(candidate, seed))

    class Fleet:
        slo = Slo(ttft=1.0, attainment=0.99)

    monkeypatch.setattr(module, "run_trial", trial)
    monkeypatch.setattr(module, "map_of", lambda jobs: _Here())
    tried = search(cast(Any, Fleet()), [(2 * GIB, GIB), (GIB, GIB)], ["first-fit", "random"], 8, seeds, jobs)
    return tried, asked


class _Here:
    def __enter__(self):
        return map

    def __exit__(self, *_):
        return None


def needs(**replicas):
    """Candidates of policies that need so many replicas."""
    return lambda candidate, seed: 1.0 if candidate.replicas >= replicas[candidate.policy.replace("-", "_")] else 0.5


def test_a_candidate_that_can_t_meet_the_slo_any_more_is_left_and_later_ones_only_try_to_be_cheaper(monkeypatch):
    tried, asked = run(monkeypatch, needs(first_fit=3, random=5))
    assert [(one.candidate.policy, one.candidate.replicas, one.meets, len(one.outcomes)) for one in tried] == [
        ("first-fit", 1, False, 1),
        ("first-fit", 2, False, 1),
        ("first-fit", 4, True, 5),
        ("first-fit", 3, True, 5),
        ("random", 3, False, 1),
        ("first-fit", 3, True, 5),
    ]
    assert len(asked) == sum(len(one.outcomes) for one in tried)
    best = cheapest(tried)
    assert best is not None
    assert best.candidate == Candidate(3, 2 * GIB, GIB, "first-fit")  # the largest arena of equals


def test_the_plan_does_not_depend_on_the_jobs(monkeypatch):
    def attainment(candidate, seed):
        return 1.0 if candidate.replicas > 2 or seed != 3 else 0.98

    alone, _ = run(monkeypatch, attainment)
    several, _ = run(monkeypatch, attainment, jobs=4)
    assert alone == several
    assert [len(one.outcomes) for one in alone[:2]] == [4, 4] and not alone[0].meets  # the fourth seed fails it


def test_with_many_seeds_as_many_may_miss_as_the_interval_leaves_out(monkeypatch):
    tried, _ = run(monkeypatch, lambda candidate, seed: 0.9 if seed == 0 else 1.0, seeds=10)
    assert tried[0].meets and tried[0].attainment.low == 1.0
    tried, _ = run(monkeypatch, lambda candidate, seed: 0.9 if seed < 2 else 1.0, seeds=10)
    assert not any(one.meets for one in tried) and cheapest(tried) is None


def test_what_failed_is_said():
    candidate = Candidate(1, GIB, GIB, "random")
    late = Outcome(0.9, missed_ttft=0.08, missed_tpot=0.03)
    assert Tried(candidate, (late,), meets=False).trouble == "TTFT missed by 8.0%, TPOT missed by 3.0%"
    stopped = Outcome(0.4, stopped=True)
    assert "the queue grows: stopped when 60.0%" in Tried(candidate, (stopped,), meets=False).trouble
    assert Tried(candidate, (outcome(1.0),), meets=True).trouble == ""
    assert Tried(candidate, (stopped,), meets=False).hours is None
