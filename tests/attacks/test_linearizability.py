"""The linearizability test: histories that it must find wrong, and a short run against a real server."""

import pytest

from .linearizability import Asked, Change, History, run

EXPECTED = {("reverse", "ab"): "ba", ("upper", "ab"): "AB"}


@pytest.fixture
def history():
    """`voice` was nothing, then reverse from about 1 s on, upper from about 5 s on, and deleted at about 9 s."""
    return History({"voice": [Change(0, 0, None), Change(1, 2, "reverse"), Change(5, 6, "upper"), Change(9, 10, None)]})


def asked(begin, end, answer="", status=200, cut=None):
    return Asked("voice", "ab", begin, end, status, answer, cut)


@pytest.mark.parametrize(
    "one",
    [
        asked(3, 4, "ba"),
        asked(5.5, 5.7, "ba"),  # while it was replaced either version may answer
        asked(5.5, 5.7, "AB"),
        asked(7, 8, "AB"),
        asked(0.5, 0.8, status=404),
        asked(9.5, 9.6, status=404),
    ],
)
def test_what_a_version_of_the_time_answers_is_right(history, one):
    history.asked.append(one)
    assert history.wrong(EXPECTED) == []


@pytest.mark.parametrize(
    "one",
    [
        asked(7, 8, "ba"),  # the old version after the load's 200
        asked(3, 4, "AB"),  # a version of the future
        asked(3, 4, "bA"),  # a mixture
        asked(3, 4, "b", cut="it changed on disk"),
        asked(11, 12, "AB"),  # after the delete's 200
        asked(3, 4, status=404),
        asked(3, 4, status=500),
    ],
)
def test_what_no_version_of_the_time_answers_is_wrong(history, one):
    history.asked.append(one)
    assert len(history.wrong(EXPECTED)) == 1


@pytest.mark.slow
def test_no_answer_mixes_versions():
    history, wrong = run(names=2, clients=3, questions=10, seed=1, memory_bytes=4 << 20)
    assert wrong == []
    assert sum(len(changes) for changes in history.changes.values()) > 4
    assert sum(asked.status == 200 for asked in history.asked) > 10
