"""Requests reach the engine a few at a time, tenants in turns; all other calls at once."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.core.scheduling.overload import Overloaded
from chorus.server.engine.inbox import SUBMITTED_AT_ONCE, Inbox
from chorus.server.engine.worker import EngineWorker
from chorus.server.errors import EngineUnavailable


def call(name):
    def run(refusal=None):
        """It is only told from others."""

    run.__name__ = name
    return run


def names(calls):
    return [each.__name__ for each in calls]


def test_a_flood_of_requests_is_taken_a_few_at_a_time():
    inbox = Inbox()
    for number in range(3 * SUBMITTED_AT_ONCE):
        inbox.put_request(f"{number}", "flood", call(f"flood {number}"))
    inbox.put(call("other"))
    inbox.put_request("mine", "neighbour", call("mine"))
    taken = names(inbox.take())
    assert len(taken) == SUBMITTED_AT_ONCE + 1 and taken[-2:] == ["other", "mine"]
    assert taken[:-2] == [f"flood {number}" for number in range(SUBMITTED_AT_ONCE - 1)]
    rest = []
    while inbox:
        rest += names(inbox.take())
    assert rest == [f"flood {number}" for number in range(SUBMITTED_AT_ONCE - 1, 3 * SUBMITTED_AT_ONCE)]


def test_tenants_take_turns_and_calls_keep_their_order():
    inbox = Inbox()
    for number in range(4):
        for tenant in "ab":
            inbox.put_request(f"{tenant}{number}", tenant, call(f"{tenant}{number}"))
    inbox.put(call("last"))
    assert names(inbox.take(3)) == ["a0", "b0", "a1", "last"]
    assert names(inbox.take_all()) == ["b1", "a2", "b2", "a3", "b3"]
    assert not inbox and inbox.take() == []


def test_a_request_is_taken_out_once():
    inbox = Inbox()
    inbox.put_request("one", "", call("one"))
    inbox.put_request("two", "", call("two"))
    found = inbox.take_request("one")
    assert found is not None and found.__name__ == "one"
    assert inbox.take_request("one") is None
    assert names(inbox.take()) == ["two"]
    assert inbox.take_request("two") is None and not inbox


def test_a_request_that_is_aborted_before_the_engine_took_it_is_never_submitted(checked_worker):
    worker, engine = checked_worker
    held = threading.Event()
    waiting = worker.call(lambda _: held.wait(10))
    futures = [
        worker.submit(Request(f"r{number}", [3], RequestParams(max_tokens=1), tenant="flood"), lambda output: None)
        for number in range(2 * SUBMITTED_AT_ONCE)
    ]
    last = f"r{2 * SUBMITTED_AT_ONCE - 1}"
    aborted = worker.abort(last)
    held.set()
    assert waiting.result(10) and aborted.result(10)
    with pytest.raises(EngineUnavailable, match="aborted"):
        futures[-1].result(10)
    assert all(each.result(10) is None for each in futures[:-1])
    assert last not in engine.added and len(engine.added) == 2 * SUBMITTED_AT_ONCE - 1


def test_no_refused_request_waits_for_the_garbage_collector(checked_worker):
    worker, engine = checked_worker
    engine.refuses = True
    request = Request("r", [3], RequestParams(max_tokens=1))
    gc.disable()
    try:
        future = worker.submit(request, lambda output: None)
        with pytest.raises(Overloaded):
            future.result(10)
        gone = weakref.ref(future)
        del future
        worker.call(lambda _: None).result(10)  # its thread has left the frames of the call before
        assert gone() is None
    finally:
        gc.enable()


class Counting:
    """An engine that only counts what it is given."""

    model = None

    def __init__(self):
        self.added = []
        self.executor = self

    def watch(self, lost):
        """It is never lost."""

    def stats(self):
        return self

    num_steps = num_reads = num_waiting_for_images = 0

    def wake(self):
        """It waits for no reads."""

    def has_work(self):
        return False

    refuses = False

    def add_request(self, request):
        if self.refuses:
            raise Overloaded("", 1.0)
        self.added.append(request.id)

    def abort(self, request_id):
        return request_id in self.added

    def check_when_idle(self):
        """There is nothing to check."""

    def close(self):
        """There is nothing to close."""


@pytest.fixture
def checked_worker():
    engine = Counting()
    worker = EngineWorker(lambda: engine)  # pyright: ignore[reportArgumentType]
    worker.start()
    yield worker, engine
    worker.stop()
