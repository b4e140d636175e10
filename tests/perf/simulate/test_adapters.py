"""Reads in virtual time: a few threads, and an order that may change until a read begins."""

from __future__ import annotations

import math
from typing import Any

import pytest

from chorus.perf.simulate.adapters import SimReads
from chorus.perf.simulate.link import VirtualClock


@pytest.fixture
def clock():
    return VirtualClock(5.0)


def lasting(clock, seconds):
    def read():
        clock.now += seconds

    return read


def test_reads_take_turns_on_threads(clock):
    reads: Any = SimReads(clock, threads=2)
    futures = [reads.submit(lasting(clock, seconds)) for seconds in (1.0, 3.0, 1.0)]
    assert (clock.now, reads.free_at) == (5.0, 8.0), "the read that waits is taken to be as long as the last one"
    clock.now = 8.0
    assert all(read.done() for read in futures)
    assert [(read.start, read.end) for read in futures] == [(5.0, 6.0), (5.0, 8.0), (6.0, 7.0)]


def test_what_has_not_begun_is_put_in_order(clock):
    reads: Any = SimReads(clock, threads=1)
    first, *others = [reads.submit(lasting(clock, 1.0)) for _ in range(4)]
    clock.now = 5.5
    reads.arrange([others[2], first])
    clock.now = 6.5
    assert [read.running() for read in others] == [False, False, True]
    reads.arrange([others[1]])
    clock.now = 9.5
    assert all(read.done() for read in others)
    assert [read.end for read in others] == [9.0, 8.0, 7.0]


def test_nothing_is_put_before_a_read_that_began_before_anybody_looked(clock):
    reads: Any = SimReads(clock, threads=1)
    _, one, other = [reads.submit(lasting(clock, 1.0)) for _ in range(3)]
    clock.now = 6.5
    reads.arrange([other, one])
    clock.now = 9.0
    assert other.done()
    assert (one.start, other.start) == (6.0, 7.0)


def test_a_read_that_has_not_begun_can_be_cancelled(clock):
    reads: Any = SimReads(clock, threads=1)
    first, one, other = [reads.submit(lasting(clock, 1.0)) for _ in range(3)]
    assert not first.cancel()
    assert one.cancel()
    assert one.done()
    assert other.start == math.inf
    clock.now = 6.0
    assert other.running()


def test_a_wait_ends_with_the_first_of_the_reads(clock):
    reads: Any = SimReads(clock, threads=1)
    pending = [reads.submit(lasting(clock, 1.0)) for _ in range(2)]
    reads.wait(pending, 10.0)
    assert clock.now == 6.0
    reads.wait(pending[1:], 10.0)
    assert clock.now == 7.0


def test_the_result_of_a_read_is_waited_for(clock):
    reads: Any = SimReads(clock, threads=1)
    futures = [reads.submit(lasting(clock, 1.0)) for _ in range(3)]
    futures[2].result()
    assert clock.now == 8.0


def test_a_read_that_fails_says_so_to_whoever_takes_its_result(clock):
    def fail():
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        SimReads(clock).submit(fail).result()
