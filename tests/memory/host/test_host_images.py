"""The HOST tier: read once, kept up to a number of bytes, never in the way of a running read."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from unittest.mock import Mock

import pytest
import torch

from chorus.memory.files.error import AdapterFormatError
from chorus.memory.host.buffers import Buffers, HostBuffers
from chorus.memory.host.image import HostImage
from chorus.memory.host.images import HostImages, ThreadReads
from chorus.memory.host.reads import ReadStalled
from chorus.perf.inline_reads import InlineReads

from ..fakes import SlowReads


def fails(image):
    raise OSError("no disk")


def brings(data):
    """A read of one layer."""

    def read(image):
        image.data = data
        image.publish(1)

    return read


@pytest.fixture
def reads():
    return SlowReads()


@pytest.fixture
def images(reads):
    return HostImages(100, reads)


def held(images):
    return [key for key in "abcdef" if images.is_requested(key)]


def test_a_read_is_requested_then_ready(images, reads):
    assert (images.is_requested("a"), images.is_ready("a")) == (False, False)
    images.request("a", 10, brings("A"))
    assert (images.is_requested("a"), images.is_ready("a")) == (True, False)
    reads.finish()
    assert images.is_ready("a")
    assert images.take("a").data == images.take("a").data == "A"


def test_an_image_is_coming_once_some_of_it_is_here_or_it_has_failed(images, reads):
    found = []

    def read(image):
        found.append(images.is_coming("a"))
        image.publish(1)
        found.append(images.is_coming("a"))

    def fail(image):
        found.append(images.is_coming("b"))
        raise OSError

    assert not images.is_coming("a")
    images.request("a", 10, read)
    images.request("b", 10, fail)
    assert not images.is_coming("a")
    reads.finish()
    reads.finish()
    assert found == [False, True, False]
    assert images.is_coming("a") and images.is_coming("b")


def test_an_image_can_be_followed_while_it_is_read(images, reads):
    steps = []

    def read(image):
        image.data = "A"
        for layer in range(2):
            image.publish(layer + 1)

    images.request("a", 10, read)
    image = images.peek("a")
    assert (image.data, image.stream.num_ready) == (None, 0)
    image.follow(lambda: steps.append((image.data, image.stream.num_ready)))
    reads.finish()
    assert steps == [("A", 1), ("A", 2)]


def test_who_waits_for_reads_is_woken_by_a_first_layer():
    """Nothing else ends the wait: the read goes on, and the time allowed is longer than a test may take."""
    images, go = HostImages(100, ThreadReads(1)), threading.Event()

    def read(image):
        brings("A")(image)
        go.wait()

    images.request("a", 10, read)
    waited = threading.Thread(target=images.wait, args=(3600.0,), daemon=True)
    waited.start()
    waited.join(60.0)
    assert not waited.is_alive()
    assert (images.peek("a").stream.num_ready, images.is_ready("a")) == (1, False)
    go.set()
    images.close()


def test_who_follows_a_read_learns_that_it_failed(images, reads):
    told = []
    images.request("a", 10, fails)
    image = images.peek("a")
    image.follow(lambda: told.append(image.stream.num_ready))
    reads.finish()
    assert told == [image.stream.FAILED]
    assert str(image.error) == "no disk"


def test_what_is_here_or_coming_is_not_read_again(images, reads):
    for _ in range(3):
        images.request("a", 10, brings("A"))
    assert len(reads.pending) == 1
    reads.finish()
    images.request("a", 10, brings("A"))
    assert reads.pending == []
    assert images.num_bytes == 10


def test_failed_read_raises_and_is_forgotten(images, reads):
    images.request("a", 10, fails)
    reads.finish()
    assert images.is_ready("a")
    with pytest.raises(OSError, match="no disk"):
        images.take("a")
    assert (images.is_requested("a"), images.num_bytes) == (False, 0)
    images.request("a", 10, brings("A"))
    reads.finish()
    assert images.take("a").data == "A"


@pytest.mark.parametrize("use", ["take", "request"])
def test_least_recently_used_goes_when_room_is_short(images, reads, use):
    for key in "abc":
        images.request(key, 30, brings(key))
        reads.finish()
    if use == "take":
        images.take("a")
    else:
        images.request("a", 30, brings("a"))
    images.request("d", 30, brings("d"))
    assert held(images) == ["a", "c", "d"]
    assert images.num_bytes == 90
    images.request("e", 70, brings("e"))
    assert held(images) == ["d", "e"], "a read under way was dropped, or one that is not used was kept"
    assert images.num_bytes == 100


def test_reads_under_way_are_never_dropped_for_others(images, reads):
    for key in "abcd":
        images.request(key, 60, brings(key))
    assert held(images) == ["a", "b", "c", "d"]
    for _ in "abcd":
        reads.finish()
    images.request("e", 60, brings("e"))
    assert held(images) == ["e"]


def test_what_has_been_read_stays_whole_for_whoever_copies_it(images, reads):
    """Its room goes to another before anybody took note that its read has ended."""
    images.request("a", 60, brings("A"))
    image = images.peek("a")
    reads.finish()
    images.request("b", 60, brings("B"))
    assert held(images) == ["b"]
    assert (image.error, image.data, image.stream.num_ready) == (None, "A", 1)


def test_image_larger_than_all_room_is_held_until_another_comes(reads):
    images = HostImages(0, reads)
    images.request("a", 10, brings("A"))
    reads.finish()
    assert images.take("a").data == "A"
    images.request("b", 10, brings("B"))
    assert held(images) == ["b"]


def test_dropping_cancels_a_read_that_has_not_begun(images, reads):
    images.request("a", 10, lambda image: pytest.fail("read though it was dropped"))
    images.drop("a")
    images.drop("a")
    assert images.num_bytes == 0
    reads.finish()


def test_dropping_a_running_read_leaves_it_to_end_unseen(images, reads):
    images.request("a", 10, brings("old"))
    (future, _) = reads.pending[0]
    future.set_running_or_notify_cancel()
    images.drop("a")
    images.request("a", 10, brings("new"))
    future.set_result(None)
    assert not images.is_ready("a"), "the dropped read's end was taken for the new one's"
    reads.finish(1)
    assert images.take("a").data == "new"


def test_close_shuts_the_reads(images, reads):
    images.request("a", 10, brings("A"))
    images.close()
    assert reads.is_shut
    assert (images.num_bytes, held(images)) == (0, [])


def test_inline_reads_are_ready_at_once():
    images = HostImages(100, InlineReads())
    images.request("a", 10, brings("A"))
    images.request("b", 10, fails)
    assert images.is_ready("a")
    assert images.take("a").data == "A"
    with pytest.raises(OSError, match="no disk"):
        images.take("b")
    images.wait(10.0)  # nothing is under way: returns at once


def test_threads_read_beside_the_caller():
    images = HostImages(100, ThreadReads(threads=2))
    go, names = threading.Event(), []

    def read(image):
        names.append(threading.current_thread().name)
        assert go.wait(10)
        image.data = "A"

    images.request("a", 10, read)
    images.request("b", 10, fails)
    deadline = time.monotonic() + 10
    while not images.is_ready("b"):
        assert time.monotonic() < deadline, "one read waited for the other"
        images.wait(0.01)
    assert not images.is_ready("a")
    images.wait(0.01)
    go.set()
    images.wait(10.0)
    assert images.is_ready("a")
    assert images.take("a").data == "A"
    assert names[0].startswith("chorus-adapter-read")
    images.close()


def test_taking_waits_for_no_thread():
    images = HostImages(100, ThreadReads())
    go = threading.Event()
    images.request("a", 10, lambda image: go.wait(60) and brings("A")(image))
    assert images.take("a").data is None
    go.set()
    while not images.is_ready("a"):
        images.wait(1.0)
    assert images.take("a").data == "A"
    images.close()


# -- reads that bring nothing


class NotedReads(ThreadReads):
    """futures: of all that was submitted, in order."""

    def __init__(self, threads):
        super().__init__(threads)
        self.futures = []

    def submit(self, read, group=""):
        self.futures.append(super().submit(read))
        return self.futures[-1]


class Watched:
    """Images under a clock that the test turns, read by threads; a read goes on when its event is set."""

    def __init__(self):
        self.now = 0.0
        self.reads = NotedReads(threads=1)
        self.images = HostImages(1000, self.reads, lambda: self.now, stall_seconds=30.0)
        self.steps: dict[str, threading.Semaphore] = {}
        self.began: dict[str, threading.Event] = {}

    def request(self, key, layers=4, num_bytes=10):
        step, began = threading.Semaphore(0), threading.Event()
        self.steps[key], self.began[key] = step, began

        def read(image):
            began.set()
            image.data = key
            for layer in range(layers):
                assert step.acquire(timeout=60)
                image.publish(layer + 1)

        self.images.request(key, num_bytes, read, label=f"/adapters/{key}")

    def wait(self, seconds, count=40):
        for _ in range(count):
            self.now += seconds / count
            self.images.watch()

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)


@pytest.fixture
def watched():
    made = Watched()
    yield made
    for step in made.steps.values():
        step.release(100)
    made.images.close()


def test_a_read_that_brings_nothing_is_given_up_and_others_go_on(watched):
    watched.request("hung")
    assert watched.began["hung"].wait(60)
    image = watched.images.peek("hung")
    told = []
    image.follow(lambda: told.append(image.stream.num_ready))
    watched.request("next")
    assert not watched.began["next"].is_set(), "there is one thread"
    watched.wait(2)
    assert watched.images.is_slow("hung")
    assert watched.began["next"].wait(60), "nobody reads beside it"
    watched.steps["next"].release(4)
    watched.until(lambda: watched.images.is_ready("next"))
    assert watched.images.counts().oldest_seconds == pytest.approx(2, abs=0.2)
    watched.wait(31)
    error = watched.images.error("hung")
    assert "/adapters/hung: its read made no progress for 31 s" in str(error)
    assert "adapter_read_seconds" in str(error)
    assert told == [image.stream.FAILED]
    assert image.data is None
    counts = watched.images.counts()
    assert (counts.num_given_up, counts.num_failed, counts.num_under_way) == (1, 0, 0)
    with pytest.raises(ReadStalled):
        watched.images.take("hung")


def test_a_read_that_was_given_up_changes_nothing_when_it_goes_on(watched):
    watched.request("hung")
    assert watched.began["hung"].wait(60)
    image = watched.images.peek("hung")
    watched.wait(40)
    assert watched.images.error("hung") is not None
    assert watched.images.num_bytes == 10, "its thread may still have the buffer"
    watched.images.drop("hung")
    watched.images.request("hung", 10, brings("again"), label="/adapters/hung")
    assert "an earlier read of it still hangs" in str(watched.images.error("hung"))
    watched.images.drop("hung")
    assert watched.images.num_bytes == 10
    watched.steps["hung"].release(4)
    watched.until(watched.reads.futures[0].done)
    assert (image.stream.num_ready, image.data) == (image.stream.FAILED, None)
    watched.images.request("hung", 10, brings("again"))
    watched.until(lambda: watched.images.is_ready("hung"))
    assert watched.images.take("hung").data == "again"
    assert watched.images.num_bytes == 10


def test_a_slow_read_that_goes_on_may_take_its_time(watched):
    watched.request("slow", layers=5)
    image = watched.images.peek("slow")
    for layer in range(4):
        watched.steps["slow"].release()
        watched.until(lambda layer=layer: image.stream.num_ready == layer + 1)
        watched.wait(29)
    watched.steps["slow"].release()
    watched.until(lambda: watched.images.is_ready("slow"))
    assert watched.images.take("slow").data == "slow"


def test_the_pace_of_a_read_is_its_own(watched):
    """As exact as the looks at it are frequent."""
    near = functools.partial(pytest.approx, abs=0.06)
    watched.request("slow", layers=4)
    image = watched.images.peek("slow")
    assert watched.began["slow"].wait(60)
    watched.request("behind")
    watched.wait(0.9)
    assert watched.images.pace("slow") == (near(0.9), 0.0)
    assert watched.images.pace("behind") == (near(0.9), 0.0), "its wait for a thread counts"
    watched.steps["slow"].release()
    watched.until(lambda: image.stream.num_ready == 1)
    assert watched.images.pace("slow") == (0.0, near(0.9))
    watched.wait(2, count=80)
    assert watched.images.pace("slow") == (near(2), near(0.9))
    assert watched.images.pace("unknown") == (0.0, 0.0)


def test_large_layers_may_take_longer(watched):
    watched.request("large", num_bytes=16 << 20)
    assert watched.began["large"].wait(60)
    watched.wait(60)
    assert watched.images.error("large") is None
    watched.wait(5)
    assert watched.images.error("large") is not None


def test_what_waits_behind_others_that_go_on_is_not_given_up(watched):
    watched.reads.set_aside = lambda future: False
    watched.request("slow", layers=5)
    image = watched.images.peek("slow")
    watched.request("behind")
    for layer in range(4):
        watched.steps["slow"].release()
        watched.until(lambda layer=layer: image.stream.num_ready == layer + 1)
        watched.wait(25)
    assert watched.images.error("behind") is None
    watched.wait(80)
    assert watched.images.error("slow") is not None
    assert "could not begin" in str(watched.images.error("behind"))


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_may_begin_because_another_is_not_wanted_is_given_its_time(watched, has_ended):
    """Nobody looks at the reads for long; then the one ahead is dropped, and its thread is free at that moment, or is
    since it ended.
    """
    watched.request("unwanted")
    assert watched.began["unwanted"].wait(60)
    watched.request("behind")
    watched.now += 40
    if has_ended:
        watched.steps["unwanted"].release(4)
        watched.until(lambda: watched.images.is_ready("unwanted"))
    watched.images.drop("unwanted")
    watched.reads.futures[1].running = lambda: False  # its thread has not come round to it yet
    watched.images.watch()
    assert watched.images.error("behind") is None


def test_time_in_which_the_process_was_stopped_is_not_the_disks(watched):
    """After SIGSTOP, or on a virtual machine that stood still, a read has had no more time than anybody."""
    watched.request("read")
    assert watched.began["read"].wait(60)
    watched.wait(10)
    watched.now += 3600
    watched.wait(10)
    assert watched.images.error("read") is None
    watched.wait(40)
    assert watched.images.error("read") is not None


def test_closing_does_not_wait_for_a_read_that_hangs(watched):
    watched.request("hung")
    assert watched.began["hung"].wait(60)
    watched.wait(2)
    watched.images.close()
    assert watched.reads.futures[0].running()


def test_a_read_that_nobody_wants_any_more_ends_with_its_next_layer(watched):
    watched.request("a")
    assert watched.began["a"].wait(60)
    image = watched.images.peek("a")
    watched.images.drop("a")
    watched.steps["a"].release()
    watched.until(watched.reads.futures[0].done)
    assert image.stream.num_ready == image.stream.FAILED
    watched.request("b")
    assert watched.began["b"].wait(60)


def test_a_thread_that_cannot_be_started_fails_the_image_only(monkeypatch):
    images = HostImages(100, ThreadReads())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        images.request("a", 10, brings("A"))
    assert str(images.error("a")) == "no thread"
    images.drop("a")
    images.request("a", 10, brings("A"))
    while not images.is_ready("a"):
        images.wait(1.0)
    assert images.take("a").data == "A"
    images.close()


# -- images that may be dropped


def test_what_is_held_is_not_dropped_for_others(images, reads):
    held_keys = {"a"}
    for key in "ab":
        images.request(key, 40, brings(key), may_drop=lambda key=key: key not in held_keys)
        reads.finish()
    assert images.has_room(60)
    assert not images.has_room(61)
    images.request("c", 90, brings("c"))
    assert held(images) == ["a", "c"]
    held_keys.clear()
    reads.finish()
    images.request("d", 100, brings("d"))
    assert held(images) == ["d"]


def test_an_image_may_be_put_in_place_of_a_failed_one(images, reads):
    images.request("a", 10, fails)
    reads.finish()
    image = HostImage()
    image.data = "A"
    image.publish(1)
    images.put("a", 10, image)
    assert images.take("a") is image
    assert (images.num_bytes, images.error("a")) == (10, None)


@pytest.mark.parametrize("threads", [False, True])
def test_a_failed_read_leaves_nothing_behind(threads):
    """Its error has frames that hold the buffer, and the image holds the error: no collector is needed all the same."""
    buffers, kept = HostBuffers(), []
    images = HostImages(1 << 30, ThreadReads() if threads else InlineReads())

    def read(image):
        part = image.data = buffers.take((1 << 20,), torch.uint8)
        kept.append(weakref.ref(part))
        image.publish(1)
        try:
            raise OSError("no disk")
        except OSError as error:
            raise AdapterFormatError(f"{len(part)} bytes wanted") from error

    gc.collect()
    gc.disable()
    try:
        images.request("a", 1 << 20, read)
        image = images.peek("a")
        deadline = time.monotonic() + 60
        while not images.is_ready("a"):
            assert time.monotonic() < deadline
            images.wait(0.1)
        with pytest.raises(AdapterFormatError, match="bytes wanted") as caught:
            images.take("a")
        while kept[0]() is not None:
            assert time.monotonic() < deadline, f"{caught.value} and {image} keep its buffer"
            time.sleep(0.002)
    finally:
        gc.enable()
    images.close()


class TwoRates(Buffers):
    """Memory of two kinds; the faster one has no room until `has_room`. slow: addresses of tensors in the other."""

    def __init__(self):
        self.slow, self.has_room, self.moves = set(), False, 0

    def take(self, shape, dtype):
        taken = torch.zeros(*shape, dtype=dtype)
        self.slow.add(taken.data_ptr())
        return taken

    def is_slow(self, tensor):
        return tensor.data_ptr() in self.slow

    def moved(self, tensor):
        self.moves += 1
        return tensor.clone() if self.has_room else None


@pytest.fixture
def rates():
    return TwoRates()


@pytest.fixture
def slow_image(images, reads, rates):
    """An image that was read into the slower memory."""
    images.request("a", 10, lambda image: (image.take(rates, (4,), torch.int32).fill_(7), image.publish(1)))
    reads.finish()
    return images.take("a")


def test_an_image_moves_to_faster_memory_once_that_has_room(images, reads, rates, slow_image):
    before = slow_image.data
    images.hasten("a")
    assert slow_image.data is before, "not on this thread"
    reads.finish()
    assert slow_image.data is before, "there is no room"
    rates.has_room = True
    images.hasten("a")
    reads.finish()
    assert slow_image.data is not before
    assert slow_image.data.tolist() == [7] * 4
    assert images.take("a") is slow_image
    images.hasten("a")
    assert not reads.pending, "it is there"


def test_an_image_that_is_being_read_does_not_move(images, reads, rates):
    rates.has_room = True
    started = []

    def read(image):
        image.take(rates, (4,), torch.int32)
        started.append(images.hasten("a"))
        image.publish(1)

    images.request("a", 10, read)
    images.hasten("a")
    reads.finish()
    assert (len(started), reads.pending) == (1, [])


@pytest.mark.parametrize("gone", ["dropped", "failed"])
def test_a_move_that_comes_too_late_changes_nothing(images, reads, rates, slow_image, gone):
    rates.has_room = True
    images.hasten("a")
    if gone == "dropped":
        images.drop("a")
        reads.finish()
        assert slow_image.data.tolist() == [7] * 4, "whoever still copies it"
    else:
        slow_image.fail(ReadStalled("it is given up"))
        reads.finish()
        assert slow_image.data is None


def test_an_image_that_fails_while_it_moves_has_no_data(rates, images, reads, slow_image):
    rates.moved = lambda tensor: (slow_image.fail(ReadStalled("it is given up")), tensor.clone())[1]
    images.hasten("a")
    reads.finish()
    assert slow_image.data is None


def test_a_move_that_fails_is_logged_and_leaves_the_image(images, reads, rates, slow_image, caplog):
    def fail(tensor):
        raise OSError("no memory to pin")

    rates.moved = fail
    images.hasten("a")
    reads.finish()
    assert "no memory to pin" in caplog.text
    assert slow_image.data.tolist() == [7] * 4


def test_a_move_for_which_there_is_no_thread_is_left_out(images, reads, slow_image, monkeypatch):
    monkeypatch.setattr(reads, "submit", Mock(side_effect=RuntimeError("can't start new thread")))
    images.hasten("a")
    assert slow_image.data.tolist() == [7] * 4


def test_a_slow_read_that_has_ended_is_slow_no_more_though_nobody_has_looked(watched):
    watched.request("slow")
    assert watched.began["slow"].wait(60)
    watched.wait(2)
    assert watched.images.is_slow("slow") and not watched.images.is_coming("slow")
    watched.steps["slow"].release(4)
    watched.until(lambda: watched.images.is_ready("slow"))
    assert not watched.images.is_slow("slow") and watched.images.is_coming("slow")
