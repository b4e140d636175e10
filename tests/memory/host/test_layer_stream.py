import ctypes
import threading
import time

from chorus.memory.host.image import HostImage, LayerStream


def test_layers_are_there_once_published():
    stream = LayerStream()
    assert not stream.wait(0, 0)
    stream.publish(2)
    assert stream.num_ready == 2
    assert stream.wait(1, 0)
    assert not stream.wait(2, 0)


def test_a_waiter_wakes_when_its_layer_comes():
    stream = LayerStream()
    threading.Timer(0.02, stream.publish, [3]).start()
    assert stream.wait(2, 10)


def test_a_failed_stream_wakes_its_waiters_at_once():
    stream = LayerStream()
    stream.publish(1)
    threading.Timer(0.02, stream.fail).start()
    start = time.monotonic()
    assert not stream.wait(1, 60)
    assert time.monotonic() - start < 30


def test_native_code_sees_the_count_change():
    stream = LayerStream()
    count = ctypes.c_int32.from_address(stream.address)
    stream.publish(5)
    assert count.value == 5
    stream.fail()
    assert count.value == LayerStream.FAILED


def test_only_the_first_failure_of_an_image_counts():
    image, first = HostImage(), OSError("gone")
    image.fail(first)
    image.fail(OSError("again"))
    assert image.error is first
