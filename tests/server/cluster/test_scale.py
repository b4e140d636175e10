"""When a cluster asks for one more replica, and when it offers one back."""

from __future__ import annotations

import pytest

from chorus.server.cluster.router.replicas import ReplicaState
from chorus.server.cluster.router.scale import STEADY_SECONDS, SteadyHint, scale_hint


@pytest.mark.parametrize(
    ("requests", "waiting", "hint"),
    [
        ([0], 0, 0),
        ([4], 0, 0),
        ([5], 0, 1),
        ([8, 8, 8], 0, 1),
        ([8, 8, 4], 0, 0),
        ([8, 4, 4], 0, -1),
        ([0, 0], 0, -1),
        ([0, 0], 1, 1),
        ([], 0, 1),
    ],
)
def test_a_hint_follows_the_number_of_lightly_loaded_replicas(requests, waiting, hint):
    assert scale_hint([ReplicaState(8, num_requests=count) for count in requests], waiting) == hint


def test_a_replica_whose_pages_are_full_is_not_lightly_loaded():
    empty, full = ReplicaState(8), ReplicaState(8, num_requests=1, kv_tokens=600, free_tokens=400)
    assert scale_hint([empty, empty], 0) == -1
    assert scale_hint([empty, full], 0) == 0
    assert scale_hint([full, full], 0) == 1


def test_a_hint_is_given_once_it_has_held():
    steady = SteadyHint()
    assert not steady.update(1, 0.0) and steady.value == 0
    assert not steady.update(0, 1.0) and not steady.update(1, 2.0)
    assert not steady.update(1, STEADY_SECONDS + 1.0)
    assert steady.update(1, STEADY_SECONDS + 2.0) and steady.value == 1
    assert not steady.update(1, STEADY_SECONDS + 3.0)
    assert not steady.update(-1, STEADY_SECONDS + 4.0) and steady.value == 1
    assert steady.update(-1, 2 * STEADY_SECONDS + 4.0) and steady.value == -1


def test_while_replicas_come_or_go_there_is_no_hint_and_the_next_one_has_to_hold_anew():
    steady = SteadyHint(5.0)
    assert not steady.update(1, 0.0) and steady.update(1, 5.0)
    assert steady.update(None, 6.0) and steady.value == 0
    assert not steady.update(None, 60.0) and not steady.update(1, 61.0) and not steady.update(1, 65.0)
    assert steady.update(1, 66.0) and steady.value == 1
