"""The event loop of a cluster's links: a thread of its own runs it until a server takes it over."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from chorus.core.executors.base import ModelInfo
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import RequestOutput
from chorus.server.cluster.address import UnixSocket
from chorus.server.cluster.cluster_worker import ClusterWorker
from chorus.server.cluster.link import Link
from chorus.server.cluster.registered_catalog import RegisteredCatalog
from chorus.server.cluster.report import Hello, ModelIdentity
from chorus.server.cluster.router import POLICIES, Estimates
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.engine.subscribers import Subscribers
from chorus.server.errors import EngineUnavailable
from chorus.server.settings import Settings


@pytest.fixture
def worker(tmp_path):
    """A worker that waits for two replicas which never come."""
    estimates = Estimates()
    links = [Link(f"r{index}", UnixSocket(tmp_path / "nowhere"), b"s" * 32, 30.0) for index in range(2)]
    ended = []
    worker = ClusterWorker(
        links,
        POLICIES["least-delay"](estimates, None),
        Settings(model=BUILTIN_MODEL),
        on_stop=lambda: ended.append(True),
        estimates=estimates,
    )
    worker.start()
    yield worker
    worker.stop()
    assert ended == [True]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "chorus-cluster"]


def test_no_thread_but_the_server_s_runs_the_links_once_it_has_taken_their_loop(worker):
    (thread,) = threads()
    assert worker.abort("unknown").result(10) is False
    loop = worker.take_loop()
    assert not thread.is_alive() and not loop.is_running()
    later = worker.abort("unknown")
    assert not later.done(), "nothing runs the loop"

    async def serve():
        assert await asyncio.wrap_future(worker.abort("unknown")) is False
        assert later.result() is False, "what came meanwhile was waiting"
        await asyncio.to_thread(worker.stop)
        links = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*links, return_exceptions=True), 10)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(serve())
    assert worker.abort("unknown").result(10) is False, "an ended worker answers, too"


def test_a_worker_of_which_no_server_took_the_loop_ends_it_and_its_thread(worker):
    (thread,) = threads()
    worker.stop()
    assert not thread.is_alive() and worker.take_loop().is_closed()


def test_links_that_end_with_the_cluster_are_no_deaths(worker, caplog):
    worker.on_down(worker.links[0], stuck=False)
    assert worker.dispatcher.num_deaths == 1 and "replica r0 is gone" in caplog.text
    caplog.clear()
    worker.stop()
    worker.on_down(worker.links[1], stuck=False)
    assert worker.dispatcher.num_deaths == 1 and not caplog.records


def test_a_front_waits_for_all_replicas_at_the_cluster_s_start_and_for_one_when_it_is_started_again(worker):
    def wait(was_whole):
        worker.wait_until_ready(lambda: "a replica is away", was_whole=was_whole)

    with pytest.raises(EngineUnavailable):
        wait(was_whole=True)
    worker.links[1].hello = object()
    with pytest.raises(EngineUnavailable):
        wait(was_whole=False)
    wait(was_whole=True)
    worker.links[0].hello = object()
    wait(was_whole=False)


def test_requests_that_come_together_do_not_overfill_the_queue(worker, monkeypatch):
    """Each was told that there is room: none of them was queued yet."""
    monkeypatch.setattr(worker, "_settings", worker._settings.model_copy(update={"max_waiting": 2}))  # noqa: SLF001

    def ask(tenant, count):
        params = RequestParams(max_tokens=4)
        names = [f"{tenant}{index}" for index in range(count)]
        asked = [worker.submit(Request(name, [5], params, tenant=tenant), lambda _: None) for name in names]
        worker.abort("unknown").result(10)  # the loop has come to all of them
        return names, [type(one.exception()).__name__ if one.done() else "waits" for one in asked]

    worker.check_room("a", None, 1)
    names, told = ask("a", 4)
    assert told == ["waits", "waits", "Overloaded", "Overloaded"], "what is left of two replicas' queue is for others"
    assert [ask(tenant, 1)[1] for tenant in "bcd"] == [["waits"], ["waits"], ["Overloaded"]]
    for name in names:
        worker.abort(name)
    assert ask("e", 1)[1] == ["waits"]


def test_a_request_whose_client_left_while_its_adapter_was_hashed_leaves_nothing(worker):
    accepted, request = Future(), Request("r", [5], RequestParams())
    accepted.cancel()
    worker._add(request, None, lambda _: None, None, accepted)  # noqa: SLF001
    worker.abort("unknown").result(10)
    assert "r" not in worker.dispatcher.in_flight and "r" not in worker._subscribers  # noqa: SLF001


@pytest.mark.parametrize("speculates", [False, True])
def test_the_model_speculates_as_its_replicas_do(worker, monkeypatch, speculates):
    """So that an API server tells its clients truly whether their `prediction` has an effect."""
    identity, model = ModelIdentity("model", "float32", "avx512", "1"), ModelInfo(300, 512, (2,))
    told = Hello(identity, model, 8, 8, 16, 1 / 16, 1, speculates=speculates).to_wire()
    monkeypatch.setattr(worker.dispatcher, "on_up", lambda link: None)
    worker.links[0].hello = Hello.from_wire(told)
    worker.on_up(worker.links[0])
    assert worker.model.speculates is speculates
    del told["speculates"]
    assert not Hello.from_wire(told).speculates, "a replica of an earlier version"


def test_names_are_asked_for_once_a_replica_is_there_to_check_their_adapters(tmp_path, monkeypatch):
    """An API server that was started again had put the registry's adapters into quarantine, as no replica was there
    yet.
    """
    followed = threading.Event()

    class Client:
        async def wait_for_copy(self):
            followed.set()

        async def stop(self):
            pass

    monkeypatch.setattr(RegisteredCatalog, "follow", lambda *_: Client())
    links = [Link("r0", UnixSocket(tmp_path / "nowhere"), b"s" * 32, 30.0)]
    worker = ClusterWorker(
        links,
        POLICIES["least-delay"](Estimates(), None),
        Settings(model=BUILTIN_MODEL),
        registry=UnixSocket(tmp_path / "registry"),
    )
    worker.start()
    try:
        assert not followed.wait(0.3)
        links[0].hello = object()
        assert followed.wait(30)
    finally:
        worker.stop()


def test_outputs_that_are_delivered_on_their_receiver_s_loop_are_there_at_once():
    subscribers, seen = Subscribers(), []

    async def deliver():
        subscribers.add("a", seen.append, asyncio.get_running_loop())
        subscribers.deliver([output := RequestOutput("a", (5,))])
        assert seen == [output]

    asyncio.run(deliver())


def test_outputs_of_another_thread_are_handed_over_to_their_receiver_s_loop():
    subscribers, seen = Subscribers(), []

    async def receive():
        here, came = threading.get_ident(), asyncio.Event()

        def on_output(output):
            seen.append((output.token_ids, threading.get_ident() == here))
            came.set()

        subscribers.add("a", on_output, asyncio.get_running_loop())
        await asyncio.to_thread(subscribers.deliver, [RequestOutput("a", (5,))])
        await asyncio.wait_for(came.wait(), 10)

    asyncio.run(receive())
    assert seen == [((5,), True)]
