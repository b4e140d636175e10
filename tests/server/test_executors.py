"""Pools whose threads may be stuck for ever."""

import asyncio
import subprocess
import sys
import threading

import pytest

from chorus.server.errors import as_api_error
from chorus.server.executors import DaemonPool, Executors, PoolFull


def test_results_and_errors_come_back():
    pool = DaemonPool("test", 2)
    assert pool.submit(pow, 2, 5).result(10) == 32
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(10)
    assert asyncio.run(pool.run(max, 3, 4)) == 4


def test_it_runs_as_many_at_once_as_it_has_threads():
    pool, together = DaemonPool("test", 3), threading.Barrier(3, timeout=30)
    assert sorted(future.result(30) for future in [pool.submit(together.wait) for _ in range(3)]) == [0, 1, 2]


def test_threads_are_reused():
    pool = DaemonPool("test", 2)
    names = set()
    for _ in range(20):
        names.add(pool.submit(lambda: threading.current_thread().name).result(10))
    assert len(names) <= 2


def test_a_full_queue_refuses_and_cancelled_calls_leave_it():
    pool, release = DaemonPool("test", 1, max_waiting=2), threading.Event()
    begun = threading.Event()
    stuck = pool.submit(lambda: (begun.set(), release.wait(60)))
    assert begun.wait(10)
    waiting = [pool.submit(int) for _ in range(2)]
    with pytest.raises(PoolFull, match=r"busy$") as full:
        pool.submit(int)
    assert as_api_error(full.value).message == "all 1 threads for test are busy; try again later"
    assert waiting[0].cancel()
    late = pool.submit(int, "7")
    release.set()
    assert late.result(10) == 7 and waiting[1].result(10) == 0 and stuck.done()


def test_a_pool_whose_thread_could_not_be_started_goes_on(monkeypatch):
    pool = DaemonPool("test", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"):
            pool.submit(int, "1")
    assert pool.submit(int, "2").result(10) == 2


def test_one_kind_of_work_does_not_fill_anothers_threads():
    executors, release = Executors(), threading.Event()
    for _ in range(10):
        executors.text.submit(release.wait, 60)
    assert executors.stop.submit(int, "3").result(10) == 3
    release.set()
    executors.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        executors.text.submit(int)


def test_threads_that_are_stuck_for_ever_do_not_keep_the_process():
    code = """
import threading
from chorus.server.errors import as_api_error
from chorus.server.executors import Executors
executors, begun = Executors(), threading.Semaphore(0)
for pool in (executors.text, executors.stop):
    pool.submit(lambda: (begun.release(), threading.Event().wait()))
for _ in range(2):
    begun.acquire()
executors.shutdown()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
