"""Rounds of a flood, taken together."""

from __future__ import annotations

import pytest

from chorus.perf.bench.sections.tenants import Served, p99, rate, slower


def test_rounds_of_a_flood_are_taken_together():
    """One long wait of a round is one of all; the flood's own waits do not count."""
    quick, slow, own = [0.1] * 49, [2.1], [9.0] * 50
    calm = Served({0: own, 1: quick}, 60, 1.0)
    rounds = [
        {"turns": Served({0: own, 1: quick + slow}, 90, 1.0), "calm": calm},
        {"turns": Served({0: own, 1: quick}, 110, 1.0), "calm": calm},
    ]
    assert p99(rounds, "calm") == pytest.approx(0.1)
    assert slower(rounds[:1]) == pytest.approx(11.2)  # between the two longest of 50
    assert 1 < slower(rounds) < 1.5  # half as far from the longest of 99
    assert rate(rounds, "turns") == 100
