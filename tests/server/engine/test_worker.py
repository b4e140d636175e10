"""The engine's thread: deliveries, calls, failures and its end."""

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from chorus.core.requests.request import Request
from chorus.core.requests.request_params import InvalidRequest, RequestParams
from chorus.core.requests.types import FinishReason
from chorus.memory.transfers.transfer import ExecutorLost
from chorus.server.engine import worker as worker_module
from chorus.server.engine.watchdog import POLL_SECONDS, Watchdog
from chorus.server.engine.worker import MAX_FAILED_STEPS, EngineWorker
from chorus.server.errors import EngineUnavailable


@pytest.fixture
def worker(fake_engine):
    worker = EngineWorker(lambda: fake_engine)
    worker.start()
    yield worker
    fake_engine.gate.set()
    worker.stop()


def request(request_id="r", tokens=(97, 98), adapter=None, **params) -> Request:
    return Request(request_id, list(tokens), RequestParams(**params), adapter)


class Receiver:
    """Collects one request's outputs."""

    def __init__(self) -> None:
        self.outputs = []
        self.done: Future = Future()

    def __call__(self, output) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.done.set_result(output)


def run(worker: EngineWorker, asked: Request) -> Receiver:
    receiver = Receiver()
    worker.submit(asked, receiver).result(5)
    receiver.done.result(5)
    return receiver


def test_outputs_come_in_order_and_end_once(worker):
    receiver = run(worker, request())
    assert [output.token_ids for output in receiver.outputs] == [(97,), (98,), (257,)]
    assert [output.finish_reason for output in receiver.outputs] == [None, None, FinishReason.STOP]


def test_only_the_workers_thread_touches_the_engine(worker, fake_engine):
    run(worker, request())
    assert worker.call(lambda engine: threading.get_ident()).result(5) in fake_engine.threads
    assert len(fake_engine.threads) == 1 and threading.get_ident() not in fake_engine.threads


def test_what_comes_wakes_a_step_that_waits_for_reads(worker, fake_engine):
    """A step that has nothing to run but reads to wait for ends at once when somebody asks for something."""
    step, has_work = fake_engine.step, fake_engine.has_work
    fake_engine.has_work = lambda: True

    def wait_or_step():
        if has_work():
            return step()
        assert fake_engine.woken.wait(60)
        fake_engine.woken.clear()
        return []

    fake_engine.step = wait_or_step
    worker.call(lambda engine: None).result(5)  # from now on the worker waits in a step
    receiver = Receiver()
    worker.submit(request(), receiver).result(5)
    assert receiver.done.result(5).finish_reason is FinishReason.STOP
    fake_engine.has_work = has_work
    worker.call(lambda engine: None).result(5)


def test_refusals_come_through_the_future(worker):
    with pytest.raises(InvalidRequest) as caught:
        worker.submit(request(adapter="nobody"), Receiver()).result(5)
    assert caught.value.field == "model"


def test_an_id_can_be_used_once_at_a_time(worker, fake_engine):
    fake_engine.gate.clear()
    first = Receiver()
    worker.submit(request(), first)
    second = worker.submit(request(), Receiver())
    fake_engine.gate.set()
    with pytest.raises(ValueError, match="already"):
        second.result(5)
    assert first.done.result(5).finish_reason is FinishReason.STOP


def test_an_aborted_request_gives_nothing_more(worker, fake_engine):
    fake_engine.gate.clear()
    receiver = Receiver()
    worker.submit(request(), receiver)
    aborted = worker.abort("r")
    fake_engine.gate.set()
    assert aborted.result(5) is True
    assert worker.abort("r").result(5) is False
    count = len(receiver.outputs)
    time.sleep(0.05)
    assert len(receiver.outputs) == count <= 1


def test_a_cancelled_submission_never_reaches_the_engine(worker, fake_engine):
    fake_engine.gate.clear()
    blocker = Receiver()
    worker.submit(request("a"), blocker).result(5)
    late = worker.submit(request("b"), Receiver())
    assert late.cancel()
    fake_engine.gate.set()
    blocker.done.result(5)
    assert worker.call(lambda engine: engine.has_work()).result(5) is False


def test_a_failed_step_ends_the_requests_and_the_worker_goes_on(worker, fake_engine):
    fake_engine.fail_steps = 1
    output = run(worker, request()).outputs[-1]
    assert output.finish_reason is FinishReason.ERROR and "RuntimeError" in output.error
    assert worker.healthy
    assert run(worker, request("again")).outputs[-1].finish_reason is FinishReason.STOP


def test_steps_that_keep_failing_make_it_unhealthy(worker, fake_engine):
    fake_engine.fail_steps = 1000
    for number in range(MAX_FAILED_STEPS):
        assert worker.healthy
        run(worker, request(str(number)))
    assert not worker.healthy and "restart" in worker.failure
    with pytest.raises(EngineUnavailable):
        worker.submit(request("late"), Receiver()).result(5)


def test_an_engine_that_cannot_be_cleared_is_unhealthy(worker, fake_engine):
    fake_engine.fail_steps, fake_engine.fail_aborts = 1, True
    assert run(worker, request()).outputs[-1].finish_reason is FinishReason.ERROR
    assert not worker.healthy


def test_a_lost_device_tells_the_requests_and_stops_the_worker(worker, fake_engine):
    """At once: no later step can do better."""
    fake_engine.step_error = ExecutorLost("the device failed: CUDA error: an illegal memory access was encountered")
    output = run(worker, request()).outputs[-1]
    assert output.finish_reason is FinishReason.ERROR and "illegal memory access" in output.error
    worker.stop()
    assert not worker.healthy and "illegal memory access" in worker.trouble
    with pytest.raises(EngineUnavailable, match="started again"):
        worker.submit(request("late"), Receiver()).result(5)
    assert fake_engine.closed


def test_a_receiver_that_raises_harms_nobody(worker):
    def broken(output):
        raise ValueError("no")

    worker.submit(request("broken"), broken)
    assert run(worker, request("fine")).outputs[-1].finish_reason is FinishReason.STOP


def test_a_call_that_raises_gives_its_error_to_the_caller(worker):
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda engine: 1 / 0).result(5)
    assert worker.healthy


@pytest.mark.parametrize("ask", ["call", "sleep", "wake"])
def test_who_has_an_answer_sees_its_effect_in_the_stats(worker, fake_engine, monkeypatch, ask):
    """They were made anew after the caller had been answered: `/metrics` showed the pages of a cache that was reset."""
    gate, before, seen = threading.Event(), fake_engine.stats(), []
    state = [before]
    monkeypatch.setattr(fake_engine, "stats", lambda: state[0])

    def act(_=None):
        assert gate.wait(5)
        state[0] = replace(before, num_steps=before.num_steps + 1)

    monkeypatch.setattr(worker_module, "Sleep", lambda _: act() if ask == "sleep" else SimpleNamespace(wake=act))
    if ask == "wake":
        worker.sleep().result(5)
    asked = worker.call(act) if ask == "call" else getattr(worker, ask)()
    asked.add_done_callback(lambda _: seen.append(worker.stats.num_steps - before.num_steps))  # on the worker's thread
    gate.set()
    asked.result(5)
    assert seen == [1]


def test_idle_means_asleep(worker, fake_engine):
    run(worker, request())
    polls = 0
    has_work = fake_engine.has_work

    def counting():
        nonlocal polls
        polls += 1
        return has_work()

    fake_engine.has_work = counting
    time.sleep(0.2)
    assert polls <= 1


def test_a_device_that_is_lost_in_a_call_stops_the_worker(worker):
    """Such as one that pins an adapter; its caller gets the error, and so does another caller."""

    def lost(engine):
        raise ExecutorLost("the device failed: CUDA error: an ECC error")

    with pytest.raises(ExecutorLost):
        worker.call(lost).result(5)
    worker.stop()
    assert "ECC error; the server ends" in worker.failure
    with pytest.raises(EngineUnavailable):
        worker.call(lambda engine: None).result(5)


def test_a_device_that_is_lost_while_a_failed_step_is_cleared_stops_the_worker(worker, fake_engine, monkeypatch):
    fake_engine.step_error = RuntimeError("no")

    def lost(request_id):
        raise ExecutorLost("the device failed: CUDA error: an ECC error")

    monkeypatch.setattr(fake_engine, "abort", lost)
    receiver = run(worker, request())
    assert receiver.outputs[-1].finish_reason is FinishReason.ERROR
    worker.stop()
    assert "ECC error; the server ends" in worker.failure


def test_stopping_ends_requests_and_closes_the_engine(worker, fake_engine):
    fake_engine.gate.clear()
    receiver = Receiver()
    worker.submit(request(ignore_eos=True, max_tokens=10**6), receiver).result(5)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    time.sleep(0.05)
    fake_engine.gate.set()
    stopper.join(5)
    assert receiver.done.result(5).finish_reason is FinishReason.ABORT
    assert fake_engine.closed and not worker.healthy
    with pytest.raises(EngineUnavailable):
        worker.submit(request("late"), Receiver()).result(5)
    worker.stop()


def test_what_building_raises_start_raises():
    def build():
        raise FileNotFoundError("no weights")

    worker = EngineWorker(build)
    with pytest.raises(FileNotFoundError, match="no weights"):
        worker.start()
    assert not worker.healthy
    worker.stop()


def test_a_step_reaches_a_loop_in_one_go(worker, fake_engine):
    async def main():
        loop = asyncio.get_running_loop()
        handed, done, ended = [], asyncio.Event(), []
        call_soon_threadsafe = loop.call_soon_threadsafe

        def spy(callback, *args, **kwargs):
            if args and isinstance(args[0], list):
                handed.append(len(args[0]))
            return call_soon_threadsafe(callback, *args, **kwargs)

        loop.call_soon_threadsafe = spy

        def receive(output):
            assert asyncio.get_running_loop() is loop
            if output.finish_reason is not None:
                ended.append(output.request_id)
                if len(ended) == 3:
                    done.set()

        fake_engine.gate.clear()
        worker.submit(request("blocker"), Receiver()).result(5)
        for name in "abc":
            worker.submit(request(name), receive, loop)
        fake_engine.gate.set()
        await asyncio.wait_for(done.wait(), 5)
        assert handed == [3, 3, 3]

    asyncio.run(main())


def test_a_closed_loop_does_not_stop_the_worker(worker, fake_engine):
    loop = asyncio.new_event_loop()
    loop.close()
    worker.submit(request("orphan", ignore_eos=True, max_tokens=10**6), Receiver(), loop).result(5)
    assert run(worker, request()).outputs[-1].finish_reason is FinishReason.STOP
    assert worker.call(lambda engine: engine.has_work()).result(5) is False


def test_a_violated_accounting_invariant_costs_no_token_and_stops_the_worker(worker, fake_engine):
    """The answer whose end made the engine idle is told first; then nothing more is promised."""
    fake_engine.accounts_match = False
    last = run(worker, request()).outputs[-1]
    assert last.finish_reason is FinishReason.STOP and last.stop_token_id == 257
    worker.stop()
    assert not worker.healthy and "invariant" in worker.trouble
    with pytest.raises(EngineUnavailable, match="invariant"):
        worker.submit(request("late"), Receiver()).result(5)
    assert fake_engine.closed


class Watch:
    """A watchdog under a clock of the test's, which looks twice a second as the real one does."""

    def __init__(self, worker: EngineWorker) -> None:
        self.now = 0.0
        self.dog = Watchdog(worker, stall_seconds=8, give_up_seconds=30, clock=lambda: self.now)

    def look(self, seconds: float) -> None:
        """Let so many seconds go by."""
        for _ in range(round(seconds / POLL_SECONDS)):
            self.now += POLL_SECONDS
            self.dog.look()


@pytest.fixture
def watch(worker):
    return Watch(worker)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_step_that_hangs_is_seen_and_its_requests_end(worker, watch, fake_engine):
    fake_engine.gate.clear()
    receiver = Receiver()
    worker.submit(request(ignore_eos=True, max_tokens=10**6), receiver).result(5)
    waiting = worker.call(lambda engine: 1)
    watch.look(7)
    assert worker.healthy and not receiver.outputs
    watch.look(3)
    assert not worker.healthy and "10 s" in worker.trouble
    with pytest.raises(EngineUnavailable, match="has not finished a step"):
        worker.call(lambda engine: 1).result(5)
    watch.look(22)
    output = receiver.done.result(5)
    assert output.finish_reason is FinishReason.ABORT and "cancelled" in output.error
    with pytest.raises(EngineUnavailable, match="cancelled"):
        waiting.result(5)
    fake_engine.gate.set()  # it answers after all
    wait_for(lambda: not fake_engine.running and worker.progress is None)
    watch.look(0.5)
    assert worker.healthy
    assert run(worker, request("next")).outputs[-1].finish_reason is FinishReason.STOP
    assert len(receiver.outputs) == 1, "a cancelled request ends once"


def test_an_abort_is_never_refused(worker, watch, fake_engine):
    """A client that leaves while a step hangs: its request ends with the step."""
    fake_engine.gate.clear()
    worker.submit(request("left", ignore_eos=True, max_tokens=10**6), Receiver()).result(5)
    watch.look(10)
    assert not worker.healthy
    aborted, late = worker.abort("left"), worker.abort("left")
    fake_engine.gate.set()
    assert (aborted.result(5), late.result(5)) == (True, False)
    wait_for(lambda: not fake_engine.running and worker.progress is None)
    watch.look(0.5)
    fake_engine.gate.clear()
    worker.submit(request("hung", ignore_eos=True, max_tokens=10**6), Receiver()).result(5)
    aborted = worker.abort("hung")
    worker.cancel_all("it hangs")
    assert aborted.result(5) is False, "it has ended as all others"
    fake_engine.gate.set()
    wait_for(lambda: not fake_engine.running)
    worker.stop()
    assert worker.abort("hung").result(5) is False, "an engine that ended runs nothing"


def test_requests_that_no_step_serves_are_given_up(worker, watch, fake_engine, monkeypatch):
    """Steps that do nothing, though nothing is being read: the thread is alive and gets nowhere."""
    steps = []
    monkeypatch.setattr(fake_engine, "step", lambda: steps.append(time.sleep(0.001)) or [])
    receiver = Receiver()
    worker.submit(request(adapter="alice"), receiver).result(5)
    wait_for(lambda: len(steps) > 3)
    watch.look(10)
    assert not worker.healthy
    watch.look(22)
    assert receiver.done.result(5).finish_reason is FinishReason.ABORT
    wait_for(lambda: not fake_engine.running and worker.progress is None)
    watch.look(0.5)
    assert worker.healthy


def test_a_slow_read_is_not_a_hung_step(worker, watch, fake_engine, monkeypatch):
    """Requests that wait for an adapter whose disk hangs: the read has a deadline of its own, and others come in."""
    reading = replace(fake_engine.stats(), num_reads=1, oldest_read_seconds=40.0)
    monkeypatch.setattr(fake_engine, "step", lambda: time.sleep(0.001) or [])
    monkeypatch.setattr(fake_engine, "stats", lambda: reading)
    receiver = Receiver()
    worker.submit(request(adapter="alice"), receiver).result(5)
    for _ in range(80):
        mark = worker.progress
        wait_for(lambda mark=mark: worker.progress != mark)
        watch.look(0.5)
        assert worker.healthy
    assert not receiver.outputs, "nothing was cancelled"
    assert worker.abort("r").result(5) is True


def test_a_slow_load_is_not_a_hung_step(worker, watch, fake_engine):
    begun, release = threading.Event(), threading.Event()
    fake_engine.adapters.check = lambda *_, **limits: (begun.set(), release.wait(60))
    loading = threading.Thread(target=worker.check_adapter, args=(None,), daemon=True)
    loading.start()
    assert begun.wait(30)
    watch.look(40)
    assert worker.healthy and run(worker, request()).outputs[-1].finish_reason is FinishReason.STOP
    release.set()
    loading.join(30)


def test_time_in_which_the_watchdog_did_not_run_does_not_count(worker, watch, fake_engine):
    """As of a process that was stopped, or of a machine: the step did not run then, either."""
    fake_engine.gate.clear()
    receiver = Receiver()
    worker.submit(request(), receiver).result(5)
    watch.look(5)
    watch.now += 3600
    watch.look(1)
    assert worker.healthy and not receiver.outputs
    fake_engine.gate.set()
    assert receiver.done.result(5).finish_reason is FinishReason.STOP


def test_an_engine_that_hangs_does_not_keep_its_requests_when_it_is_stopped(worker, fake_engine):
    fake_engine.gate.clear()
    receiver = Receiver()
    worker.submit(request(), receiver).result(5)
    worker.stop(timeout=0.05)
    assert receiver.done.result(5).finish_reason is FinishReason.ABORT


def test_health_is_503_once_the_engine_broke_down(start, fake_engine):
    live = start(fake_engine)
    fake_engine.fail_steps, fake_engine.fail_aborts = 1, True
    assert live.post(model="base", prompt="a").status_code == 500
    response = live.client.get("/health")
    assert response.status_code == 503 and response.json()["status"] == "unavailable"
    assert live.post(model="base", prompt="a").status_code == 503
    assert live.client.get("/v1/models").status_code == 503
    assert live.client.get("/metrics").status_code == 200


def test_health_is_503_once_the_device_is_lost(start, fake_engine):
    live = start(fake_engine)
    fake_engine.step_error = ExecutorLost("the device failed: CUDA error: unspecified launch failure")
    assert live.post(model="base", prompt="a").status_code == 500
    response = live.client.get("/health")
    assert response.status_code == 503 and "launch failure" in response.json()["reason"]
    assert live.post(model="base", prompt="a").status_code == 503
