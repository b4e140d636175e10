"""Loads on all replicas: links whose replicas answer as a test says."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from pathlib import Path

import pytest

from chorus.core.executors.base import ModelInfo
from chorus.memory.files.error import AdapterFormatError, LoadFailure
from chorus.server.cluster import replica_loads
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.cluster_worker import ClusterWorker
from chorus.server.cluster.link import Link
from chorus.server.cluster.replica_loads import ReplicaRefused
from chorus.server.cluster.report import Hello, ModelIdentity
from chorus.server.cluster.router import POLICIES, Estimates
from chorus.server.cluster.wire import Frame
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.errors import EngineUnavailable
from chorus.server.settings import Settings

HELLO = Hello(ModelIdentity("model", "float32", "avx512", "1"), ModelInfo(300, 512, (2,)), 8, 8, 16, 1 / 16, 1)
BUSY = (LoadFailure.UNREADABLE.value, "Too many open files")


class Answering(Link):
    """A connected link whose replica answers loads with `answers`, one after another, and then has the adapter."""

    def __init__(self, name, *answers):
        super().__init__(name, UnixSocket(Path("nowhere")), b"s" * 32, 30.0)
        self.hello, self.answers, self.sent = HELLO, list(answers), []

    async def run(self, events):
        self._events = events

    def send(self, kind, *fields):
        self.sent.append((kind, *fields))
        if kind == "load":
            answer = self.answers.pop(0) if self.answers else (None, None)
            reply = Frame("loaded", [fields[0], *answer])
            asyncio.get_running_loop().call_soon(self._events.on_frame, self, reply)


@contextmanager
def worker_of(*links):
    worker = ClusterWorker(links, POLICIES["least-delay"](Estimates(), None), Settings(model=BUILTIN_MODEL))
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(replica_loads, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(replica_loads, "RETRY_PAUSE", 0.02)


@pytest.mark.usefixtures("_quick")
def test_a_push_succeeds_once_a_replica_that_could_not_load_it_has_it():
    first, second = Answering("r0"), Answering("r1", BUSY, BUSY)
    with worker_of(first, second) as worker:
        found = worker.check_adapter(BUILTIN_ADAPTERS / "upper", everywhere=True)
        assert found.content_hash in first.loaded and found.content_hash in second.loaded


@pytest.mark.usefixtures("_quick")
def test_a_push_that_a_replica_goes_on_refusing_fails_by_its_name_and_is_forgotten_by_the_others():
    first, second = Answering("r0"), Answering("r1", *[BUSY] * 100)
    with worker_of(first, second) as worker:
        with pytest.raises(ReplicaRefused, match=r"replica r1 .*Too many open files") as told:
            worker.check_adapter(BUILTIN_ADAPTERS / "upper", everywhere=True)
        assert (told.value.status, told.value.code, told.value.retry_after) == (503, "adapter_unreadable", 1)
        worker.abort("after what the failure has begun").result(10)
        assert not first.loaded and "forget" in [kind for kind, *_ in first.sent]
        found = worker.check_adapter(BUILTIN_ADAPTERS / "upper")  # not a push: one replica is enough
        assert found.content_hash in first.loaded


@pytest.mark.usefixtures("_quick")
def test_an_adapter_that_all_replicas_find_wrong_is_wrong_and_one_that_none_could_read_may_be_pushed_again():
    wrong = (LoadFailure.INVALID.value, "it has NaN")
    cases = (
        ([Answering("r0", wrong), Answering("r1", wrong)], AdapterFormatError, "it has NaN"),
        ([Answering("r0", *[BUSY] * 100)], ReplicaRefused, "replica r0"),
    )
    for links, error, text in cases:
        with worker_of(*links) as worker, pytest.raises(error, match=text):
            worker.check_adapter(BUILTIN_ADAPTERS / "upper", everywhere=True)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("is_push", [True, False])
def test_a_load_ends_when_others_take_its_failures(monkeypatch, is_push):
    """Requests for the adapter end with the replicas' reasons, which they take away."""
    only = Answering("r0", *[BUSY] * 1000)
    monkeypatch.setattr(replica_loads.ReplicaLoads, "_refused", lambda self, content_hash: {})
    with worker_of(only) as worker, pytest.raises(EngineUnavailable, match="no replica could load the adapter"):
        worker.check_adapter(BUILTIN_ADAPTERS / "upper", everywhere=is_push)


@pytest.mark.usefixtures("_quick")
def test_a_push_of_what_a_name_serves_takes_it_from_no_replica():
    first, second = Answering("r0"), Answering("r1")
    with worker_of(first, second) as worker:
        found = worker.check_adapter(BUILTIN_ADAPTERS / "upper", everywhere=True)
        worker.adapters.register("upper", found)
        second.loaded.clear()
        second.answers = [BUSY] * 100
        with pytest.raises(ReplicaRefused):
            worker.check_adapter(BUILTIN_ADAPTERS / "upper", everywhere=True)
        worker.abort("after what the failure has begun").result(10)
        assert found.content_hash in first.loaded
