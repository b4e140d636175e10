from __future__ import annotations

import gc
import threading
import weakref

import pytest

from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.json_stream import JsonStream
from chorus.memory.host.daemon_pool import DaemonPool, NoAnswer, PoolFull


def test_stuck_functions_take_no_more_threads_than_there_may_be():
    threads, go_on, begun = DaemonPool("test", 3, 0), threading.Event(), threading.Barrier(4)

    def hang():
        begun.wait(30)
        return go_on.wait()

    stuck = [threads.submit(hang) for _ in range(3)]
    with pytest.raises(PoolFull):
        threads.submit(lambda: None)
    begun.wait(30)  # a call that has not begun could be cancelled
    with pytest.raises(TimeoutError):
        stuck[0].result(0.01)
    assert not stuck[0].cancel()
    go_on.set()
    assert all(future.result(30) for future in stuck)
    for number in range(20):  # ended work makes room before anybody hears of it
        assert threads.submit(lambda number=number: number).result(30) == number
    go_on.clear()
    again = [threads.submit(go_on.wait) for _ in range(3)]
    go_on.set()
    assert all(future.result(30) for future in again), "no thread is taken for good"


def test_who_waits_is_told_when_the_time_is_up():
    threads, go_on = DaemonPool("test", 2, 0), threading.Event()
    with pytest.raises(NoAnswer, match=r"it did not answer within 0\.01 seconds"):
        threads.wait_for(go_on.wait, 0.01)
    go_on.set()
    assert threads.wait_for(lambda: 5, 30) == 5

    def times_out():
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own") as caught:
        threads.wait_for(times_out, 30)
    assert not isinstance(caught.value, NoAnswer)


def test_errors_come_to_whoever_asked():
    threads = DaemonPool("test", 1, 0)
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(30)
    seen = threads.submit(threading.current_thread).result(30)
    assert seen.daemon
    assert seen.name == "chorus-test-1"


def test_an_adapter_that_is_refused_leaves_nothing_behind_even_without_the_collector():
    """Its header may be tens of thousands of objects, for which a collector would hold up every thread."""
    threads, kept = DaemonPool("test", 1, 0), []

    class Header:
        pass

    def refuse():
        header = Header()
        kept.append(weakref.ref(header))
        raise AdapterFormatError(f"{header} is corrupt")

    gc.disable()
    try:
        future = threads.submit(refuse)
        with pytest.raises(AdapterFormatError, match="is corrupt") as caught:
            future.result(30)
        assert kept[0]() is None, f"{caught.value} holds what was read"
    finally:
        gc.enable()


def test_a_deadline_ends_the_work_and_not_only_the_wait():
    """Of a text without an end, which is read piece by piece."""
    begun, ended = threading.Event(), threading.Event()

    def endless():
        try:
            yield b"["
            while True:
                begun.set()
                yield b"1," * 1000
        finally:
            ended.set()

    def read():
        pieces = endless()
        try:
            JsonStream(pieces).skip()
        finally:
            pieces.close()

    with DaemonPool("test", 1) as pool:
        with pytest.raises(NoAnswer):
            pool.wait_for(lambda: (read(), begun.wait(60)), 0.05)
        assert ended.wait(60)
        assert begun.is_set()
        assert pool.submit(lambda: "next").result(60) == "next"
