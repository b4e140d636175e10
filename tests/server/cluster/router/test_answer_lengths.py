"""Lengths of answers are learned by adapter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chorus.server.cluster.router import AnswerLengths
from chorus.server.cluster.router.estimates import ENOUGH, GUESS, MAX_ADAPTERS


def test_an_adapters_own_answers_count_once_there_are_enough():
    lengths = AnswerLengths()
    assert lengths.expected("a") == GUESS
    for _ in range(ENOUGH - 1):
        lengths.end("a", 10)
        lengths.end(None, 30)
    assert lengths.expected("a") == lengths.expected("b") == 20
    lengths.end("a", 10)
    assert lengths.expected("a") == 10
    assert AnswerLengths(3.0).expected("a") == 3


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300))
def test_the_mean_is_that_of_the_latest_answers(tokens):
    lengths = AnswerLengths()
    for count in tokens:
        lengths.end("a", count)
    latest = tokens[-128:]
    assert lengths.expected("a") == sum(latest) / len(latest)


def test_the_adapters_that_are_remembered_are_bounded():
    lengths = AnswerLengths()
    for number in range(2 * MAX_ADAPTERS):
        for _ in range(ENOUGH):
            lengths.end(str(number), number)
    assert lengths.expected(str(2 * MAX_ADAPTERS - 1)) == 2 * MAX_ADAPTERS - 1
    assert lengths.expected("0") == lengths.expected("never seen")
