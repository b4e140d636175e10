"""Threads that prepare and encode images have a lower priority and their own number of threads."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from chorus.core.media.background import work_in_background
from chorus.memory.host.daemon_pool import DaemonPool

from .test_encoder import Driven, request

OWN = os.getpriority(os.PRIO_PROCESS, 0)
"""Of the process that runs the tests: 0, unless someone gave them a lower one."""


def lower() -> int:
    """The priority of what works in the background."""
    return min(19, OWN + 10)


def priority_and_threads() -> tuple[int, int]:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), torch.get_num_threads()


def test_other_threads_keep_theirs() -> None:
    before = priority_and_threads()
    pool = DaemonPool("test", 1, initializer=lambda: work_in_background(3))
    assert pool.submit(priority_and_threads).result(60) == (lower(), 3)
    assert priority_and_threads() == before


def test_threads_that_one_of_them_starts_stand_back_no_further() -> None:
    """A thread of a pool starts the next one, which inherits its priority."""

    def twice() -> tuple[int, int]:
        work_in_background(1)
        first = priority_and_threads()[0]
        inner = DaemonPool("inner", 1, initializer=lambda: work_in_background(1))
        found = inner.submit(priority_and_threads).result(60)
        return first, found[0]

    assert DaemonPool("test", 1).submit(twice).result(60) == (lower(), lower())


def test_the_encoder_works_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    it, found = Driven(), list[tuple[int, int]]()
    prepare = it.maker.prepare
    monkeypatch.setattr(it.maker, "prepare", lambda item: found.append(priority_and_threads()) or prepare(item))
    it.maker.may_go.set()
    it.encoder.submit(request("1", "x"))
    it.wait(1)
    it.close()
    assert found == [(lower(), 1)]
