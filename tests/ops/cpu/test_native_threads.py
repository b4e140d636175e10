"""The native decoder's team where threads get in each other's way."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from chorus.ops.cpu import native

from ...attacks.invariance import Row, build, compute

pytestmark = pytest.mark.native
DEADLINE = 120.0


@pytest.fixture
def one_cpu():
    """Threads that are started from here on share one processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_a_team_that_waits_more_than_it_computes_gets_smaller_and_tries_again(one_cpu):
    """Eight threads on one processor: steps go on with fewer; more are tried later; the logits are always the same."""
    world = build(random.Random(3), torch.bfloat16)
    row = Row(0, 0, len(world.requests[0].tokens))
    alone = native.NativeDecoder(world.model, 1)
    expected = compute(alone, world, [row])
    decoder = native.NativeDecoder(world.model, 8)
    sizes, end = [decoder.threads], time.monotonic() + DEADLINE
    while not (1 in sizes and sizes[-1] > 1) and time.monotonic() < end:
        assert torch.equal(compute(decoder, world, [row]), expected)
        if decoder.threads != sizes[-1]:
            sizes.append(decoder.threads)
    assert sizes[0] == 8
    assert 1 in sizes, "it stayed large"
    assert sizes[-1] == 2, "it never tried more again"
    alone.close()
    decoder.close()


def test_teams_begin_and_end(one_cpu):
    """Helpers asleep, awake or never used: the team ends in any case."""
    world = build(random.Random(4), torch.float32)
    row = Row(0, 0, len(world.requests[0].tokens))
    for threads in (1, 2, 3, 40):
        for steps in (0, 1, 3):
            decoder = native.NativeDecoder(world.model, threads)
            for _ in range(steps):
                compute(decoder, world, [row])
            decoder.close()
