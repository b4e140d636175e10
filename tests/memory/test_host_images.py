"""The HOST tier: read once, kept up to a number of bytes, never in the way of a running read."""

from __future__ import annotations

import threading
import time

import pytest

from chorus.memory.host_images import HostImages, InlineReads, ThreadReads

from .fakes import SlowReads


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
    assert names[0].startswith("adapter-read")
    images.close()


def test_take_waits_for_a_thread():
    images = HostImages(100, ThreadReads())
    go = threading.Event()
    images.request("a", 10, lambda image: go.wait(10) and brings("A")(image))
    threading.Timer(0.02, go.set).start()
    assert images.take("a").data == "A"
    images.close()
