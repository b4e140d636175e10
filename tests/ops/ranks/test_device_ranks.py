"""Ranks on GPUs are abandoned from any thread, whatever NCCL still waits for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from chorus.ops.ranks import device_ranks
from chorus.ops.ranks.device_ranks import GroupCollectives
from chorus.ops.ranks.ranks import RanksLost


class Group:
    """Its abort ends when all captured steps are gone, as `ncclCommAbort` does: their collectives refer to it."""

    def __init__(self):
        self.graphs_are_gone, self.is_aborted = threading.Event(), threading.Event()

    def abort(self):
        self.is_aborted.set()
        self.graphs_are_gone.wait(60)


@pytest.fixture
def ended(monkeypatch):
    """Calls of `destroy_process_group`."""
    calls = []
    monkeypatch.setattr(
        device_ranks,
        "dist",
        SimpleNamespace(
            get_rank=lambda group: 0,
            get_world_size=lambda group: 2,
            broadcast=None,
            destroy_process_group=lambda: calls.append(True),
        ),
    )
    return calls


def test_an_abort_that_waits_for_captured_steps_keeps_no_thread(ended):
    """The thread that frees these may be the one that gives the ranks up."""
    collectives = GroupCollectives(group := Group())
    collectives.lose()
    assert group.is_aborted.wait(60)
    collectives.lose()
    with pytest.raises(RanksLost, match="the ranks were aborted"):
        collectives.lead(None)
    assert not ended
    group.graphs_are_gone.set()
    collectives.close()
    assert ended


def test_a_group_whose_abort_does_not_end_is_left(ended, monkeypatch):
    """The process can then have no other one, but it ends."""
    monkeypatch.setattr(device_ranks, "ABORT_SECONDS", 0.05)
    collectives = GroupCollectives(group := Group())
    collectives.close()
    assert group.is_aborted.is_set()
    assert not ended
    group.graphs_are_gone.set()


def test_a_group_that_has_failed_is_ended_all_the_same(ended):
    def abort():
        raise RuntimeError("it has been aborted")

    GroupCollectives(SimpleNamespace(abort=abort)).close()
    assert ended


def test_a_sum_that_fails_is_another_ranks_fault(ended, monkeypatch):
    """The connection of a process that was killed is reset before its end is known."""

    def reset(values, first, group):
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(device_ranks.dist, "broadcast", reset)
    with pytest.raises(RanksLost, match="a collective with the other ranks failed: connection reset by peer"):
        GroupCollectives(Group()).lead(None)
