"""The cost of a token: found where steps tell it, whatever disturbs some of them."""

from __future__ import annotations

import random

import pytest

from chorus.core.speculation.token_cost import TokenCost


def learned(fixed, each, *, steps=60, seed=0, disturbed=0.0):
    """Steps of one and of eight sequences, with up to five proposed tokens for each."""
    rng, cost = random.Random(seed), TokenCost()
    for _ in range(steps):
        disturbance = 50 if rng.random() < disturbed else 1
        for sequences in (1, 8):
            count = sequences * rng.randint(1, 6)
            cost.note(sequences, count, (fixed + each * count) * rng.uniform(0.95, 1.05) * disturbance)
    return cost


@pytest.mark.parametrize(("fixed", "each"), [(1.0, 0.01), (1.0, 0.1), (0.1, 0.1), (0.01, 0.2)])
def test_the_share_that_grows_with_tokens(fixed, each):
    cost = learned(fixed, each)
    for sequences in (1, 8):
        assert cost.share(sequences) == pytest.approx(each * sequences / (fixed + each * sequences), abs=0.1)


def test_steps_that_take_no_longer_with_more_tokens_cost_nothing():
    assert learned(1.0, 0.0).share(8) < 0.1
    falling = TokenCost()
    for count in range(1, 30):
        falling.note(8, count, 1 / count)
    assert falling.share(8) == 0.0


def test_nothing_is_said_before_steps_differ():
    cost = TokenCost()
    for _ in range(100):
        cost.note(8, 8, 1.0)
    assert cost.share(8) == 0.0
    few = TokenCost()
    few.note(1, 1, 1.0)
    few.note(1, 9, 9.0)
    assert few.share(1) == 0.0


def test_disturbed_steps_change_little():
    assert learned(1.0, 0.05, steps=400, disturbed=0.02).share(8) == pytest.approx(0.29, abs=0.15)


def test_the_latest_steps_count():
    cost = learned(1.0, 0.0)
    for count in [4, 8, 12, 16] * 60:
        cost.note(8, count, 0.1 * count)
    assert cost.share(8) > 0.8


def test_a_clock_that_stands_still_costs_nothing():
    assert learned(0.0, 0.0).share(4) == 0.0


def test_steps_that_hardly_differ_say_little():
    """Eight tokens, at times seven: the noise of their times must not look like what tokens cost."""
    rng = random.Random(3)
    for _ in range(20):
        cost = TokenCost()
        for _ in range(100):
            cost.note(8, rng.choice([8, 8, 8, 7]), rng.uniform(0.8, 1.2))
        assert cost.share(8) < 0.5


def test_without_proposals_what_was_learned_fades():
    """So that proposals are tried again: tokens may have become cheaper."""
    cost = learned(0.0, 1.0)
    assert cost.share(8) > 0.9
    for _ in range(600):
        cost.note(8, 8, 8.0)
    assert cost.share(8) < 0.5


def test_few_sequences_and_many_have_costs_of_their_own():
    """Up to eight tokens cost nothing, because the weights are read meanwhile; more do."""
    cost, rng = TokenCost(), random.Random(4)
    for _ in range(200):
        for sequences in (1, 8):
            tokens = sequences * rng.randint(1, 6)
            cost.note(sequences, tokens, max(8, tokens) * rng.uniform(0.95, 1.05))
    assert cost.share(1) < 0.1
    assert cost.share(8) > 0.9
    assert cost.share(7) > 0.9 and cost.share(100) == 0.0
