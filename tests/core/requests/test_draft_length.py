"""Draft lengths: long where proposals are accepted, next to none where they are not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.core.config import EngineConfig
from chorus.core.requests.draft_length import (
    LONGEST_PAUSE,
    MOST_DRAFTED,
    MOST_DRAFTS,
    Chance,
    DraftLength,
    most_logits,
)


def test_accepted_proposals_become_longer_up_to_a_limit():
    length, taken = DraftLength(), []
    for _ in range(5):
        taken.append(length.take())
        length.note(taken[-1], taken[-1])
    assert taken == [2, 4, 8, 8, 8] and max(taken) == MOST_DRAFTS


def test_the_length_follows_what_was_accepted():
    length = DraftLength()
    for proposed, accepted, following in ((8, 3, 4), (4, 1, 2), (2, 2, 4)):
        length.note(proposed, accepted)
        assert length.take() == following


def test_where_none_is_accepted_nearly_nothing_is_proposed():
    length, proposed = DraftLength(), 0
    for _ in range(2000):
        if count := length.take():
            length.note(count, 0)
            proposed += count
    assert proposed < 45
    while not length.take():
        pass
    length.note(1, 1)  # and one accepted token ends that
    assert [length.take(), length.take()] == [2, 2]


def test_tokens_that_are_not_worth_their_cost_are_left_out():
    """With half of the tokens accepted, the third of a proposal is worth an eighth of a token."""
    length = DraftLength()
    assert length.chance == 0.5
    for _ in range(40):
        length.note(4, 4)
    assert length.chance > 0.98 and length.take(0.8) == MOST_DRAFTS
    for _ in range(60):
        length.note(2, 1)
    assert length.chance == pytest.approx(0.5, abs=0.1)
    assert [length.take(cost) for cost in (0.0, 0.2, 0.3)] == [2, 2, 1]


def test_where_no_token_is_worth_its_cost_one_is_tried_at_times():
    """So that it is noticed when tokens become cheaper, or better."""
    length = DraftLength()
    taken = [length.take(0.9) for _ in range(1000)]
    assert set(taken) == {0, 1}
    assert taken.index(1) > LONGEST_PAUSE
    length.note(1, 1)
    assert sum(length.take(0.9) for _ in range(LONGEST_PAUSE)) == 0
    assert next(count for count in iter(lambda: length.take(0.1), None) if count) == 2


@given(st.floats(0, 1), st.integers(0, 1000))
def test_a_length_is_within_its_bounds(share, seed):
    rng, length, steps = random.Random(seed), DraftLength(), 0
    for _ in range(300):
        count = length.take()
        assert 0 <= count <= MOST_DRAFTS
        if count:
            steps += 1
            accepted = next((i for i in range(count) if rng.random() > share), count)
            length.note(count, accepted)
    assert steps


@pytest.mark.parametrize(
    ("seqs", "tokens", "most"),
    [(4, 512, 4 * (1 + MOST_DRAFTS)), (4, 20, 20), (4, 4, 4), (100, 512, MOST_DRAFTED), (300, 512, 300)],
)
def test_a_step_of_drafts_has_more_logits(seqs, tokens, most):
    config = EngineConfig(model=Path("x"), max_num_seqs=seqs, max_num_batched_tokens=tokens, speculation="ngram")
    assert most_logits(config) == most
    assert most_logits(config.model_copy(update={"speculation": "off"})) == seqs


def test_a_request_begins_with_what_others_had_accepted():
    """Where a token must be accepted with 0.7, half of them at first would be too few to try."""
    others = Chance()
    assert others.value == 0.5
    for _ in range(50):
        others.note(4, 4)
    assert others.value > 0.95
    assert [DraftLength(prior).take(0.7) for prior in (0.5, others.value)] == [0, 2]
    length = DraftLength(others.value)
    for _ in range(3):
        length.note(4, 0)
    assert length.chance < 0.4
    for _ in range(400):
        others.note(4, 0)
    assert others.value < 0.05
