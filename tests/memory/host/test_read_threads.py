"""Threads that read: one that hangs costs a thread, and nobody waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from chorus.memory.host.reads import ThreadReads

WAIT = 60.0


class Hung:
    """A read that begins and goes on when the test says so."""

    def __init__(self):
        self.began, self.go = threading.Event(), threading.Event()

    def __call__(self):
        self.began.set()
        assert self.go.wait(WAIT)
        return "late"


@pytest.fixture
def reads():
    made = ThreadReads(threads=2, most_threads=5)
    yield made
    made.shutdown()


@pytest.fixture
def num_threads():
    """Counts the reading threads that have begun since, and are alive."""
    before = set(threading.enumerate())
    return lambda: sum(thread.name.startswith("chorus-adapter-read") for thread in set(threading.enumerate()) - before)


def hang(reads, count):
    hung = [Hung() for _ in range(count)]
    futures = [reads.submit(one) for one in hung]
    return hung, futures


def test_reads_give_results_and_errors(reads):
    good, bad = reads.submit(lambda: 7), reads.submit(lambda: 1 // 0)
    assert good.result(WAIT) == 7
    assert isinstance(bad.exception(WAIT), ZeroDivisionError)


def test_no_more_than_asked_for_read_at_once(reads, num_threads):
    hung, _ = hang(reads, 2)
    for one in hung:
        assert one.began.wait(WAIT)
    behind = reads.submit(lambda: 7)
    assert not behind.running()
    assert num_threads() == 3, "two that read, and who comes next"
    hung[0].go.set()
    assert behind.result(WAIT) == 7
    hung[1].go.set()


def test_others_are_read_beside_reads_that_are_set_aside(reads):
    hung, futures = hang(reads, 2)
    for one in hung:
        assert one.began.wait(WAIT)
    behind = reads.submit(lambda: 7)
    assert all(reads.set_aside(future) for future in futures)
    assert behind.result(WAIT) == 7
    for one in hung:
        one.go.set()
    assert [future.result(WAIT) for future in futures] == ["late", "late"]
    assert reads.submit(lambda: 8).result(WAIT) == 8


def test_what_has_not_begun_is_read_in_the_order_that_was_asked_for_last(reads):
    hung, _ = hang(reads, 2)
    for one in hung:
        assert one.began.wait(WAIT)
    order: list[str] = []
    futures = {name: reads.submit(lambda name=name: order.append(name)) for name in "abcd"}
    reads.arrange([futures["d"], futures["b"]])
    hung[0].go.set()
    for future in futures.values():
        future.result(WAIT)
    assert order == ["d", "b", "a", "c"]
    hung[1].go.set()


def test_threads_are_bounded_and_what_is_beyond_waits(reads, num_threads):
    hung, futures = hang(reads, 6)
    for one, future in zip(hung[:5], futures[:5], strict=True):
        assert one.began.wait(WAIT)
        assert reads.set_aside(future)
    assert num_threads() == 5
    assert not futures[5].running()
    for one in hung:
        one.go.set()
    assert futures[5].result(WAIT) == "late"


def test_who_asks_for_reads_starts_the_first_thread_only(reads, monkeypatch):
    """The engine's thread would wait for each until it runs, and all requests with it."""
    start, starters = threading.Thread.start, []

    def note(self):
        starters.append(threading.current_thread())
        start(self)

    monkeypatch.setattr(threading.Thread, "start", note)
    hung, futures = hang(reads, 5)
    for one, future in zip(hung, futures, strict=True):
        assert one.began.wait(WAIT)
        assert reads.set_aside(future)
    assert starters.count(threading.current_thread()) == 1
    assert len(starters) == 5
    for one in hung:
        one.go.set()


def test_a_thread_that_could_not_be_started_beforehand_is_started_when_it_is_wanted(reads, monkeypatch):
    start, refused = threading.Thread.start, []

    def refuse(self):
        if threading.current_thread() is not threading.main_thread():
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (hung,), (future,) = hang(reads, 1)
    assert hung.began.wait(WAIT)
    assert len(refused) == 1
    assert reads.set_aside(future)
    assert reads.submit(lambda: 7).result(WAIT) == 7
    hung.go.set()
    assert future.result(WAIT) == "late"


def test_what_has_not_begun_or_has_ended_is_not_set_aside(reads):
    done = reads.submit(lambda: 7)
    done.result(WAIT)
    hung, _ = hang(reads, 2)
    for one in hung:
        assert one.began.wait(WAIT)
    behind = reads.submit(lambda: 7)
    assert not reads.set_aside(behind)
    for one in hung:
        one.go.set()
    behind.result(WAIT)


def test_closing_waits_for_no_read_that_was_set_aside():
    reads = ThreadReads(threads=1)
    (hung,), (future,) = hang(reads, 1)
    assert hung.began.wait(WAIT)
    reads.set_aside(future)
    behind, *_ = hang(reads, 1)
    assert behind[0].began.wait(WAIT), "it was read beside the other"
    queued = reads.submit(lambda: 7)
    reads.shutdown()
    assert queued.cancelled()
    assert not future.done()
    with pytest.raises(RuntimeError, match="closed"):
        reads.submit(lambda: 7)
    hung.go.set()
    behind[0].go.set()


def test_closed_reads_have_let_go_of_what_they_held():
    """Freed while the interpreter ends, a tensor would take the process with it."""
    freed = threading.Event()

    class Read:
        def __call__(self):
            return 1

        def __del__(self):
            time.sleep(0.2)
            freed.set()

    reads = ThreadReads(threads=1)
    future = reads.submit(Read())  # an assertion here would hold the read
    assert future.result() == 1
    reads.shutdown()
    assert freed.is_set()


def test_a_thread_that_cannot_be_started_is_told(reads, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(6):  # more than there may be: none is counted that did not start
            with pytest.raises(RuntimeError, match="start new thread"):
                reads.submit(lambda: 7)
    assert reads.submit(lambda: 7).result(WAIT) == 7


def test_all_threads_but_one_go_when_there_is_nothing_to_do(monkeypatch, num_threads, reads):
    monkeypatch.setattr("chorus.memory.host.daemon_pool.IDLE_SECONDS", 0.01)
    hung, futures = hang(reads, 2)
    for one in hung:
        assert one.began.wait(WAIT)
        one.go.set()
    assert [future.result(WAIT) for future in futures] == ["late", "late"]
    deadline = time.monotonic() + WAIT
    while num_threads() > 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert reads.submit(lambda: 8).result(WAIT) == 8


def test_the_process_ends_though_a_read_hangs():
    code = (
        "import threading; from chorus.memory.host.reads import ThreadReads; began = threading.Event()\n"
        "ThreadReads().submit(lambda: (began.set(), threading.Event().wait()))\n"
        "assert began.wait(60)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_who_waits_for_a_read_is_woken_when_there_is_something_else_to_do(reads):
    """Nothing else ends the wait: the read hangs, and the time allowed is longer than a test may take."""
    hung, pending = hang(reads, 1)
    assert hung[0].began.wait(WAIT)
    waited = threading.Thread(target=reads.wait, args=(pending, 10 * WAIT), daemon=True)
    waited.start()
    reads.wake()
    waited.join(WAIT)
    assert not waited.is_alive()
    reads.wake()  # also when it comes before the wait
    reads.wait(pending, 10 * WAIT)
    hung[0].go.set()
    assert pending[0].result(WAIT) == "late"


def test_a_directory_that_hangs_keeps_no_other_from_being_read():
    """All threads were once taken by its reads; a quarter of them are, at most, and the rest of its reads wait."""
    reads = ThreadReads(threads=2, most_threads=16)
    hung = [Hung() for _ in range(20)]
    futures = [reads.submit(one, "hangs") for one in hung]
    for following, future in zip([*hung[1:5], hung[4]], futures[:5], strict=True):
        assert following.began.wait(WAIT)  # so the fifth has begun before the fourth is set aside
        assert reads.set_aside(future)
        assert reads.set_aside(future), "a second time changes nothing"
    assert reads.is_full("hangs") and not reads.is_full("other")
    for number in range(20):
        assert reads.submit(lambda number=number: number, "other").result(WAIT) == number
    assert not any(future.running() for future in futures[5:])
    for one in hung[:2]:
        one.go.set()
    assert hung[5].began.wait(WAIT), "two have returned, so another begins"
    for one in hung:
        one.go.set()
    for future in futures:
        assert future.result(WAIT) == "late"
    reads.shutdown()
