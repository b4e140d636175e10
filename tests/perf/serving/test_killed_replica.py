"""What a killed replica does to answers: the counts, and a moment of a real cluster."""

from __future__ import annotations

import json

import pytest

from chorus.perf.serving.errors import LoadError
from chorus.perf.serving.killed_replica import judged, main


def test_answers_are_counted_against_those_before_the_kill():
    before = [(at, at + 0.5, True) for at in range(4)]
    during = [(9.8, 10.1, True), (9.9, 12.9, True), (9.7, 10.2, None)]
    after = [(11.0, 11.2, False), (12.0, 12.5, True)]
    found = judged([*before, *during, *after], 10.0)
    assert (found["answers"], found["in_progress"], found["wrong"], found["lost"]) == (9, 3, 1, 1)
    assert found["delayed"] == 1 and found["longest_delay"] == pytest.approx(2.5)


def test_a_kill_without_answers_is_no_measurement():
    with pytest.raises(LoadError):
        judged([(0.0, 1.0, True)], 10.0)


@pytest.mark.slow
def test_a_moment_of_a_cluster(capsys):
    assert main(["--seconds", "12", "--clients", "4"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["wrong"] == found["lost"] == 0 < found["in_progress"] + found["delayed"]
