"""Sampling: the right tokens with the right frequencies, from nothing but (seed, position)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chorus.ops.sampling import apply_penalties, sample, uniform

#: A grid of draws that reaches every token of a share above 1/4000.
GRID = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000


def draw(logits, u, temperature=1.0, top_k=0, top_p=1.0):
    """One row of logits, a draw per element of u."""
    rows = len(u)
    return sample(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.as_tensor(u, dtype=torch.float64),
    )


def kept_by_transformers(logits, temperature, top_k, top_p):
    """Probabilities after transformers' warpers, in their order."""
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)[0]


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 19, 20, 500]),
    top_p=st.sampled_from([0.01, 0.3, 0.7, 0.95, 1.0]),
)
def test_shares_are_those_of_transformers(seed, temperature, top_k, top_p):
    """An even grid of draws gives every token its exact share; nothing outside top_k and top_p is ever drawn."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(seed)) * 2
    share = kept_by_transformers(logits, temperature, top_k, top_p)
    drawn = draw(logits, GRID, temperature, top_k, top_p).bincount(minlength=20) / len(GRID)
    torch.testing.assert_close(drawn, share, rtol=0, atol=2 / len(GRID))
    assert not drawn[share == 0].any()


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_greedy_is_the_largest_logit_whatever_the_draw(seed, u):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(seed))
    mixed = sample(
        logits,
        torch.tensor([0.0, 1.0, 0.0, 0.5]),
        torch.tensor([0, 0, 3, 0]),
        torch.tensor([1.0, 1.0, 0.5, 0.9]),
        torch.full((4,), u, dtype=torch.float64),
    )
    assert mixed[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    for row, parameters in ((1, (1.0, 0, 1.0)), (3, (0.5, 0, 0.9))):
        assert mixed[row] == draw(logits[row], [u], *parameters)[0], "a row depends on its neighbours"


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-8, 1e-3])
def test_tiny_temperatures_are_greedy(temperature):
    logits = torch.tensor([1.0, 5.0, -2.0, 4.0])
    assert draw(logits, [0.0, 0.5, 0.999], temperature).tolist() == [1, 1, 1]


@pytest.mark.parametrize("temperature", [50.0, 100.0])
def test_large_temperatures_are_nearly_even(temperature):
    drawn = draw(torch.tensor([1.0, 5.0, -2.0, 4.0]), GRID, temperature).bincount(minlength=4) / len(GRID)
    assert (drawn - 0.25).abs().max() < 0.03


@pytest.mark.parametrize("parameters", [{"top_k": 1}, {"top_p": 1e-9}])
def test_smallest_limits_keep_the_best_token(parameters):
    logits = torch.tensor([1.0, 5.0, -2.0, 4.0])
    assert set(draw(logits, GRID, **parameters).tolist()) == {1}


def test_extreme_draws_stay_among_the_kept_tokens():
    logits = torch.tensor([-50.0, 1.0, 2.0, -50.0])
    assert draw(logits, [0.0, 1 - 2**-53], top_k=2).tolist() == [1, 2]


@given(st.integers(0, 1000), st.floats(0, 1, exclude_max=True), st.floats(1e-7, 1e-6))
def test_nearly_equal_logits_do_not_swap_places(seed, u, noise):
    """Rounding between batches moves a draw only when it hits a border, not whenever two logits swap ranks."""
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    logits[7] = logits[2]
    shaken = logits.clone()
    shaken[7] += noise
    borders = logits.double().softmax(-1).cumsum(-1)
    assume((borders - u).abs().min() > 1e-5)
    assert draw(logits, [u]).item() == draw(shaken, [u]).item()


def test_seeded_draws_follow_the_distribution():
    """Pearson's chi-square over the generator's own draws."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5))
    share = logits.softmax(-1)
    for seed in (0, 1, 2**62 + 17):
        count = 6000
        drawn = draw(logits, [uniform(seed, position) for position in range(count)]).bincount(minlength=12)
        chi_square = float(((drawn - count * share).square() / (count * share)).sum())
        assert chi_square < 31.3, "above the 99.9 % quantile for 11 degrees of freedom"


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000_000))
def test_uniform_is_a_function_into_the_unit_interval(seed, position):
    u = uniform(seed, position)
    assert 0 <= u < 1
    assert u == uniform(seed, position)


def test_uniform_has_known_values():
    """A change here changes every seeded answer ever given."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1)] == [
        0.5079605879681605,
        0.17601256256594233,
        0.4224192380508798,
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        [uniform(7, position) for position in range(20_000)],
        [uniform(seed, 3) for seed in range(20_000)],
        [uniform(seed, seed) for seed in range(20_000)],
    ],
    ids=["positions", "seeds", "diagonal"],
)
def test_uniform_is_even_and_uncorrelated(numbers):
    values = torch.tensor(numbers, dtype=torch.float64)
    count = len(values)
    bins = torch.histc(values, bins=50, min=0, max=1)
    assert float(((bins - count / 50).square() / (count / 50)).sum()) < 85.4, "99.9 % quantile for 49 degrees"
    assert abs(float(values.mean()) - 0.5) < 4 / math.sqrt(12 * count)
    centred = values - values.mean()
    correlation = float((centred[1:] * centred[:-1]).mean() / centred.square().mean())
    assert abs(correlation) < 4 / math.sqrt(count)
    assert len(values.unique()) == count


# -- min_p, penalties


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    min_p=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    top_k=st.sampled_from([0, 3, 8]),
    top_p=st.sampled_from([0.6, 1.0]),
)
def test_min_p_shares_are_those_of_transformers(seed, temperature, min_p, top_k, top_p):
    """min_p over the tempered distribution, then top_k, then top_p of what is left."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(seed)) * 2
    scores = MinPLogitsWarper(min_p)(None, TemperatureLogitsWarper(temperature)(None, logits[None]))
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    share = scores.softmax(-1)[0]
    drawn = sample(
        logits.expand(len(GRID), -1),
        torch.full((len(GRID),), temperature),
        torch.full((len(GRID),), top_k),
        torch.full((len(GRID),), top_p),
        GRID,
        torch.full((len(GRID),), min_p),
    ).bincount(minlength=20) / len(GRID)
    torch.testing.assert_close(drawn, share, rtol=0, atol=2 / len(GRID))
    assert not drawn[share == 0].any()


def test_min_p_of_one_row_does_not_touch_another():
    logits = torch.tensor([1.0, 2.0, 1.9]).expand(2 * len(GRID), -1)
    ones = torch.ones(2 * len(GRID))
    min_p = torch.tensor([0.95, 0.0]).repeat_interleave(len(GRID))
    tokens = sample(logits, ones, ones.long() * 0, ones, GRID.repeat(2), min_p)
    assert set(tokens[: len(GRID)].tolist()) == {1}
    assert tokens[len(GRID) :].tolist() == draw(logits[0], GRID).tolist()


TOKENS = st.lists(st.integers(0, 9), max_size=12)


@given(seed=st.integers(0, 1000), seen=st.lists(st.integers(0, 9), min_size=1, max_size=12), penalty=st.floats(0.3, 3))
def test_repetition_penalty_is_that_of_transformers(seed, seen, penalty):
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 3
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits[None].clone())[0]
    apply_penalties(logits, torch.tensor(seen), torch.tensor([], dtype=torch.long), penalty, 0.0, 0.0)
    torch.testing.assert_close(logits, want)


@given(seed=st.integers(0, 1000), output=TOKENS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_penalties_follow_openais_formula(seed, output, presence, frequency):
    """mu[j] → mu[j] − c[j]·frequency − [c[j] > 0]·presence, c counting generated tokens only."""
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    want = [
        mu - output.count(token) * frequency - (output.count(token) > 0) * presence
        for token, mu in enumerate(logits.tolist())
    ]
    apply_penalties(logits, torch.tensor([1, 2, 3, *output]), torch.tensor(output, dtype=torch.long), 1.0, presence,
                    frequency)  # fmt: skip
    torch.testing.assert_close(logits, torch.tensor(want), rtol=1e-5, atol=1e-5)


def test_penalties_leave_a_forbidden_token_forbidden():
    logits = torch.tensor([-torch.inf, 1.0])
    apply_penalties(logits, torch.tensor([0, 1]), torch.tensor([0, 1]), 0.5, -2.0, -2.0)
    assert logits[0] == -torch.inf
    assert logits[1] == 2.0 + 4.0
