"""dLoRA's three algorithms against their pseudo-code: hand-made cases, and properties."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.merging.dlora import (
    ALPHA,
    GAMMA_DEC,
    GAMMA_MUL,
    AdaptiveThresholds,
    ArtifactThresholds,
    Credits,
    DynamicBatching,
    Iteration,
    first,
    throughputs,
    tuned,
    waived,
)
from chorus.core.merging.mode_policy import ModeChoice, ModeState


@dataclass(eq=False)
class Voice:
    name: str
    rank: int = 8
    version: int = field(default=0)

    def __repr__(self):
        return self.name


A, B, C = (Voice(name, version=index) for index, name in enumerate("abc"))
NOBODY = ModeChoice()


@dataclass
class Flat:
    """A merged step takes `merged` seconds, another one `unmerged`, a merge `merge`."""

    merged: float = 0.05
    unmerged: float = 0.1
    merge: float = 0.1

    def step_seconds(self, batch, merged, context):
        return self.unmerged if merged is None else self.merged

    def merge_seconds(self, adapter):
        return self.merge


def state(requests, *, slots=8, legal=(A, B, C), **more):
    fcfs, left = {}, slots
    for adapter, count in requests.items():
        if left and count:
            fcfs[adapter] = min(count, left)
            left -= fcfs[adapter]
    defaults = {"running": fcfs, "beginning": slots - 1}
    return ModeState(requests, fcfs, legal, slots, 100.0, **(defaults | more))


# -- Algorithm 1


def test_it_merges_above_alpha_and_unmerges_below_beta():
    batching = DynamicBatching(alpha=0.6, beta=0.4)
    assert batching.choose(state({A: 6, B: 4}, slots=10)) == NOBODY, "line 8: not above alpha"
    assert batching.choose(state({A: 7, B: 3}, slots=10)) == ModeChoice(A, frozenset({A})), "lines 9 and 10"
    assert batching.choose(state({A: 4, B: 6}, slots=10)).merged is A, "line 15: not below beta"
    assert batching.choose(state({A: 3, B: 7}, slots=10)) == NOBODY, "lines 16 and 17"
    assert batching.choose(state({A: 3, B: 7}, slots=10)).merged is B


def test_requests_that_wait_count_beside_a_full_batch():
    batching = DynamicBatching(alpha=1.5, beta=0.5)
    assert batching.choose(state({B: 4, A: 12}, slots=8)) == NOBODY
    assert batching.choose(state({B: 4, A: 13}, slots=8)).merged is A


def test_only_legal_adapters_are_merged():
    batching = DynamicBatching(alpha=0.2, beta=0.1)
    assert batching.choose(state({A: 6, B: 2}, legal=(B,))).merged is B
    assert batching.choose(state({A: 6, B: 2}, legal=(A,))) == NOBODY, "it is legal no more"
    assert batching.choose(state({A: 6}, legal=())) == NOBODY
    assert DynamicBatching(0.0, 0.0).choose(state({None: 5})) == NOBODY, "the base model is no adapter"


def test_one_adapter_alone_is_merged_with_the_thresholds_of_the_artifact():
    assert ALPHA < 1.0
    assert DynamicBatching().choose(state({A: 3})).merged is A
    assert DynamicBatching().choose(state({A: 3, None: 1})) == NOBODY


counts = st.dictionaries(st.sampled_from([A, B, C, None]), st.integers(1, 20), max_size=4)


@given(st.lists(counts, max_size=30), st.floats(0.1, 1.5), st.floats(0.0, 1.0))
def test_it_follows_the_pseudo_code(steps, alpha, share):
    """The algorithm again, line by line."""
    beta, mode = alpha * share, None
    batching = DynamicBatching(alpha, beta)
    for requests in steps:
        now = state(requests)
        size = sum(now.fcfs.values())
        if mode is None:
            counted = {adapter: requests.get(adapter, 0) for adapter in (A, B, C)}
            most = max(counted, key=lambda adapter: (counted[adapter], -adapter.version))
            mode = most if counted[most] > alpha * size else None
        elif requests.get(mode, 0) < beta * size:
            mode = None
        wanted = NOBODY if mode is None else ModeChoice(mode, frozenset({mode}))
        assert batching.choose(now) == wanted


# -- Algorithm 2


def test_the_papers_example_of_amortised_switching():
    """§4.2: switching takes 100 ms, a merged step 50, another 100; three steps take 250 ms instead of 300."""
    period = [Iteration(1, 0.05, 1, 0.1)] * 3
    merging, unmerged = throughputs(period, 0.1, 0.0)
    assert (merging, unmerged) == (pytest.approx(3 / 0.25), pytest.approx(3 / 0.3))
    assert tuned(0.8, merging > unmerged) == pytest.approx(0.8 - GAMMA_DEC)
    merging, unmerged = throughputs(period[:1], 0.1, 0.0)
    assert tuned(0.8, merging > unmerged) == pytest.approx(0.8 * GAMMA_MUL)


def test_alpha_follows_the_period_that_has_passed():
    batching = DynamicBatching(alpha=0.9, beta=0.3)
    adaptive = AdaptiveThresholds(batching, Flat(), period=10)
    now = state({A: 7, B: 3}, slots=10)
    for _ in range(10):
        assert adaptive.choose(now) == NOBODY
    assert batching.alpha == 0.9, "the period is not over"
    assert adaptive.choose(now) == NOBODY, "thresholds are tuned after the decision of a step"
    assert batching.alpha == pytest.approx(0.85), "7 / 0.06 are more than 10 / 0.1"
    for _ in range(50):
        choice = adaptive.choose(now)
    assert choice.merged is A


def test_alpha_rises_where_merging_would_not_have_helped():
    batching = DynamicBatching(alpha=0.9, beta=0.3)
    adaptive = AdaptiveThresholds(batching, Flat(merged=0.09), period=5)
    for _ in range(6):
        adaptive.choose(state({A: 7, B: 3}, slots=10))
    assert batching.alpha == pytest.approx(0.9 * GAMMA_MUL)


def test_another_adapter_with_most_requests_is_a_break_point():
    batching = DynamicBatching(alpha=0.9, beta=0.3)
    adaptive = AdaptiveThresholds(batching, Flat(merge=0.0), period=1000)
    adaptive.choose(state({A: 7, B: 3}, slots=10))
    adaptive.choose(state({A: 3, B: 7}, slots=10))
    assert batching.alpha == pytest.approx(0.85)


@pytest.mark.parametrize(("merged", "beta"), [(0.09, 0.3 + GAMMA_DEC), (0.01, 0.3 / GAMMA_MUL)])
def test_beta_is_tuned_in_merged_mode(merged, beta):
    batching = DynamicBatching(alpha=0.5, beta=0.3)
    adaptive = AdaptiveThresholds(batching, Flat(merged=merged, merge=0.0), period=4)
    for _ in range(5):
        adaptive.choose(state({A: 6, B: 4}, slots=10))
    assert batching.type is A
    assert batching.beta == pytest.approx(beta)


def test_to_the_letter_alpha_has_no_bound_and_in_the_artifact_mixed_steps_leave_it_alone():
    alphas = []
    for kind in (AdaptiveThresholds, ArtifactThresholds):
        batching = DynamicBatching()
        adaptive = kind(batching, Flat(merged=0.05, unmerged=0.05))
        for step in range(2000):  # one adapter after another has most requests, none enough
            adaptive.choose(state({(A, B, C)[step % 3]: 4, (A, B, C)[(step + 1) % 3]: 3}))
        alphas.append(batching.alpha)
        adaptive.choose(state({A: 8}))
        assert (batching.type is A) == (kind is ArtifactThresholds), "no merge ever again, to the letter"
    assert alphas[0] > 1e11
    assert alphas[1] == ALPHA


@pytest.mark.parametrize(
    ("merged", "alpha", "beta"),
    [(0.02, 0.6 - GAMMA_DEC, 0.3 / GAMMA_MUL), (0.09, 0.6 * GAMMA_MUL, 0.3 + GAMMA_DEC)],
)
def test_the_artifact_tunes_beta_when_it_merges_and_alpha_when_it_unmerges(merged, alpha, beta):
    batching = DynamicBatching(alpha=0.6, beta=0.3)
    adaptive = ArtifactThresholds(batching, Flat(merged=merged, merge=0.0))
    for _ in range(300):
        adaptive.choose(state({A: 5, B: 5}, slots=10))
    assert (batching.alpha, batching.beta) == (0.6, 0.3), "however long a period is"
    adaptive.choose(state({A: 7, B: 3}, slots=10))
    assert batching.type is A
    assert (batching.alpha, batching.beta) == (0.6, pytest.approx(beta))
    for _ in range(300):
        adaptive.choose(state({A: 7, B: 3}, slots=10))
    adaptive.choose(state({A: 1, B: 9}, slots=10))
    assert batching.type is None
    assert batching.alpha == pytest.approx(alpha)


def test_the_artifact_charges_a_switch_for_each_adapter_that_would_have_been_merged():
    """Ten steps in either mode: merged mode computes more unless it has ten switches to pay for."""
    for requests, beta in (([A] * 10, 0.3 / GAMMA_MUL), ([A, B] * 5, 0.3 + GAMMA_DEC)):
        batching = DynamicBatching(alpha=0.9, beta=0.3)
        adaptive = ArtifactThresholds(batching, Flat(merged=0.05, unmerged=0.1, merge=0.05))
        for most in requests:
            adaptive.choose(state({most: 7, C: 3}, slots=10))
        adaptive.choose(state({A: 10}, slots=10))
        assert batching.beta == pytest.approx(beta)


@given(
    st.sampled_from([AdaptiveThresholds, ArtifactThresholds]),
    st.lists(counts, max_size=60),
    st.floats(0.01, 0.2),
    st.floats(0.01, 0.2),
    st.integers(1, 5),
)
def test_thresholds_keep_their_order(kind, steps, merged, unmerged, period):
    batching = DynamicBatching()
    adaptive = kind(batching, Flat(merged, unmerged), period)
    for requests in steps:
        adaptive.choose(state(requests))
        assert 0 < batching.beta < batching.alpha
        assert math.isfinite(batching.alpha)


# -- Algorithm 3


class Always:
    """Merges one adapter if it may."""

    prices = None

    def __init__(self, adapter):
        self.adapter = adapter
        self.legal = None

    def choose(self, state, legal=None):
        self.legal = list(legal)
        return ModeChoice.alone(self.adapter) if self.adapter in legal else NOBODY


def test_whoever_gives_way_is_credited_by_whoever_goes_before():
    credits = Credits(Always(A), initial=10.0, starve=100.0, normal=50.0)
    credits.choose(state({A: 6, B: 4, None: 10}, slots=10))
    assert credits.credit(B) == pytest.approx(10.4), "four of ten rows of a step"
    assert credits.credit(None) == pytest.approx(10.0)
    assert credits.credit(A) == pytest.approx(9.6)


def test_an_adapter_that_could_not_pay_is_not_eligible():
    batching = Always(A)
    credits = Credits(batching, initial=0.5, starve=100.0, normal=50.0)
    assert credits.choose(state({A: 6, B: 4}, slots=10)).merged is A
    assert credits.choose(state({A: 6, B: 4}, slots=10)) == NOBODY, "0.1 is left, 0.4 is asked"
    assert batching.legal == [B], "C would have to pay for ten rows"
    assert credits.credit(A) == pytest.approx(0.1)


def test_who_starves_is_served_first_until_its_credit_is_normal_again():
    credits = Credits(Always(A), initial=10.0, starve=11.0, normal=10.5)
    crowd = state({A: 8, B: 8}, slots=8, merged=A)  # A is first in turn
    other = state({B: 8, A: 8}, slots=8, merged=A)  # B is
    for _ in range(2):
        assert credits.choose(other).merged is A
    assert credits.credit(B) == pytest.approx(12.0)
    assert credits.choose(crowd) == ModeChoice(None, frozenset({B})), "lines 11 to 15"
    assert credits.credit(B) == pytest.approx(11.0)
    assert credits.choose(crowd).only == {B}, "it starves until it is below T_normal"
    assert credits.credit(B) == pytest.approx(10.0)
    assert credits.choose(other).merged is A


@given(st.lists(counts, max_size=60))
def test_credit_is_neither_made_nor_lost(steps):
    credits = Credits(Always(A), initial=3.0, starve=5.0, normal=4.0)
    for requests in steps:
        credits.choose(state(requests, slots=6))
        total = sum(credits.credit(adapter) for adapter in (A, B, C, None))
        assert total == pytest.approx(12.0)


def test_nobody_starves_for_ever():
    """Under an unending crowd of one adapter another one's credit comes to T_starve, and it is served."""
    credits = Credits(Always(A), initial=3.0, starve=5.0, normal=4.0)
    served = [credits.choose(state({B: 1, A: 50}, slots=8, merged=A)).only for _ in range(200)]
    assert frozenset({B}) in served
    gaps = [index for index, only in enumerate(served) if only is None or B in only]
    assert max(after - before for before, after in itertools.pairwise(gaps)) <= 20


def test_batches_are_cut_at_the_rows_of_a_step():
    assert first({A: 5, B: 5}, (A, B), 7) == {A: 5, B: 2}
    assert waived({A: 8}, {A: 2, B: 3, None: 1}) == {B: 3, None: 1}
