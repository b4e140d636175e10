"""When requests migrate, and which replicas a plan is about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chorus.server.cluster.placement.migration import AnswerSeconds, Migration, Movable, Move
from chorus.server.cluster.placement.plan import plan_moves
from chorus.server.cluster.placement.settings import MigrationSettings
from chorus.server.cluster.router import ReplicaState

SETTINGS = MigrationSettings()


def states(*counts, kv=()):
    """Replicas with so many requests, and so much of 1,000 tokens' KV in use."""
    kv = kv or [0] * len(counts)
    return [
        ReplicaState(64, count, kv_tokens=used, free_tokens=1000 - used) for count, used in zip(counts, kv, strict=True)
    ]


def requests(replicas, tokens=16, **fields):
    return [
        Movable(f"q{index}-{number}", index, None, tokens, True, 5.0, **fields)
        for index, one in enumerate(replicas)
        for number in range(one.num_requests)
    ]


def task(replicas, settings=SETTINGS, **fields):
    return Migration(settings).task(replicas, requests(replicas, **fields), 0.0)


def test_requests_migrate_where_a_replica_has_16_above_the_mean():
    assert task(states(31, 0)) is None
    found = task(states(32, 0))
    assert found is not None and found.replicas == [0, 1]
    assert len(found.moves(plan_moves(found.problem, "greedy", SETTINGS))) == 16


def test_requests_migrate_where_a_replica_is_full_and_another_is_not():
    assert task(states(2, 2, kv=(899, 0))) is None
    assert task(states(2, 2, kv=(900, 900))) is None
    assert task(states(2, 2, kv=(900, 0))) is not None


def test_a_plan_is_for_the_most_and_the_least_loaded():
    found = task(states(20, 40, 4, 5, 60, 0, 6))
    assert found is not None and found.replicas == [1, 2, 4, 5]
    assert task(states(60, 0, 0, 0), replace(SETTINGS, most_replicas=9)).replicas == [0, 1, 2, 3]


def test_room_is_what_kv_share_leaves_beside_others_kv():
    found = task(states(1, 1, kv=(900, 100)), tokens=320)
    assert found is not None
    assert found.problem.num_pages.tolist() == [(900 - 580) // 16, 900 // 16]
    assert found.problem.pages.tolist() == [20, 20]


def test_other_fronts_requests_count_and_stay():
    replicas = states(40, 0)
    own = requests(replicas)[:10]
    found = Migration(SETTINGS).task(replicas, own, 0.0)
    assert found is not None and found.problem.busy_seconds.tolist() == [150.0, 0.0]


def test_a_request_that_moved_stays_for_a_while():
    replicas = states(32, 0)
    migration, asked = Migration(SETTINGS), requests(replicas)
    migration.note([Move(one.id, 1, 0, None) for one in asked[:31]], 100.0)
    found = migration.task(replicas, asked, 129.0)
    assert found is not None
    assert [move.id for move in found.moves(plan_moves(found.problem, "greedy", SETTINGS))] == [asked[31].id]
    migration.note([], 131.0)
    assert found.problem.allowed.sum() == 33
    later = migration.task(replicas, asked, 131.0)
    assert later is not None and later.problem.allowed.all()


def test_nothing_is_planned_where_nothing_may_move():
    assert task(states(32, 0), targets=frozenset({0})) is None
    assert Migration(SETTINGS).task(states(32), [], 0.0) is None


def test_it_is_due_once_in_an_interval():
    migration = Migration(SETTINGS)
    assert [migration.is_due(now) for now in (0.0, 9.9, 10.0, 19.9, 21.0)] == [True, False, True, False, True]


def test_settings_are_read_by_name():
    found = MigrationSettings.of(["interval_seconds=2.5", "most_replicas=3"])
    assert (found.interval_seconds, found.most_replicas, found.kv_share) == (2.5, 3, 0.9)
    for text, message in (
        ("speed=1", "'speed' is not a setting"),
        ("kv_share=x", "give a number"),
        ("kv_share=0", "above 0"),
        ("kv_share=90", "a share up to 1"),
        ("most_replicas=2.5", "most_replicas is '2.5'; give a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            MigrationSettings.of([text])


def test_answers_take_what_the_latest_ones_took():
    answers = AnswerSeconds(5.0)
    assert answers.of("a") == 5.0
    answers.note("a", 2.0)
    assert answers.of("a") == 2.0 and answers.of("b") == 5.0
    for _ in range(100):
        answers.note("a", 8.0)
    assert answers.of("a") == pytest.approx(8.0, rel=1e-3)
