"""The link's turns: urgent transfers interrupt others, and no time is lost or won."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.perf.simulate.link import Link, Urgency, VirtualClock


def test_transfers_of_one_urgency_take_turns():
    clock = VirtualClock()
    link = Link(clock)
    first, second = link.send(1.0), link.send(2.0)
    assert (first.start, first.end, second.start, second.end, link.free_at) == (0.0, 1.0, 1.0, 3.0, 3.0)
    clock.now = 10.0
    assert not link.is_busy
    late = link.send(1.0, ready=12.0)
    assert (late.start, late.end) == (10.0, 12.0)
    assert link.send(1.0).start == 12.0


def test_the_more_urgent_interrupts():
    clock = VirtualClock()
    link = Link(clock)
    ahead = link.send(4.0, Urgency.AHEAD)
    clock.now = 1.0
    load = link.send(2.0)
    assert (ahead.start, ahead.end, load.start, load.end) == (0.0, 6.0, 1.0, 3.0)
    clock.now = 2.0
    swap = link.send(0.5, Urgency.SWAP)
    assert (swap.end, load.end, ahead.end) == (2.5, 3.5, 6.5)
    other = link.send(1.0, Urgency.AHEAD)
    link.hurry(other, Urgency.LOAD)
    assert (load.end, other.end, ahead.end) == (3.5, 4.5, 7.5)


sends = st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 3), st.sampled_from(Urgency)), min_size=1, max_size=12)


@given(sends)
def test_the_link_is_never_idle_nor_used_twice(sends):
    clock = VirtualClock()
    link = Link(clock)
    busy_until, found = 0.0, []
    for gap, seconds, urgency in sends:
        clock.now += gap
        busy_until = max(busy_until, clock.now) + seconds
        before = [each for each in found if each.end > clock.now and each.urgency <= urgency]
        ends = [each.end for each in before]
        found.append(link.send(seconds, urgency))
        assert [each.end for each in before] == ends  # who is as urgent doesn't wait longer
        assert link.free_at == pytest.approx(busy_until)
    assert max(each.end for each in found) == pytest.approx(busy_until)
    ordered = sorted(each.end for each in found)
    assert all(one < other for one, other in itertools.pairwise(ordered))
