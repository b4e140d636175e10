"""Draft lengths: long where proposals are accepted, next to none where they are not."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from chorus.core.requests.draft_length import MOST_DRAFTS, DraftLength, most_logits


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


def test_a_step_of_drafts_has_more_logits():
    assert most_logits(4) == 4 * (1 + MOST_DRAFTS)
