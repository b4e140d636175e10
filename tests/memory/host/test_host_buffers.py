import gc
import threading

import pytest
import torch

from chorus.memory.host.buffers import HostBuffers
from chorus.memory.pages import hugepages


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short():
    """The collector need not go through what other tests have left."""
    gc.collect()
    gc.freeze()


def test_a_buffer_is_as_asked_for():
    taken = HostBuffers().take((3, 5), torch.bfloat16)
    assert (taken.shape, taken.dtype) == ((3, 5), torch.bfloat16)
    taken[:] = 7
    assert taken.sum() == 105


def test_two_buffers_in_use_never_share_memory():
    buffers = HostBuffers()
    first, second = (buffers.take((100,), torch.float32) for _ in range(2))
    first[:], second[:] = 1, 2
    assert first.sum() == 100


def test_memory_is_used_again_once_nothing_refers_to_it():
    buffers = HostBuffers()
    taken = buffers.take((1000, 100), torch.float32)
    address, view = taken.data_ptr(), taken[3]
    del taken
    gc.collect()
    assert buffers.take((900, 100), torch.float32).data_ptr() != address, "a view still refers to it"
    gc.collect()
    del view
    gc.collect()
    again = [buffers.take((900, 100), torch.float32) for _ in range(3)]
    assert [taken.data_ptr() == address for taken in again].count(True) == 1


@pytest.mark.parametrize("count", [1, 10_000, 70_000])
def test_memory_of_the_same_size_is_used_again_however_small_it_is(count):
    """Otherwise every read of a small adapter would leave one more idle mapping."""
    buffers = HostBuffers()
    addresses = set()
    for _ in range(10):
        addresses.add(buffers.take((count,), torch.uint8).data_ptr())
        gc.collect()
    assert len(addresses) == 1


@pytest.mark.parametrize("count", [10, 10_000_000], ids=["far smaller", "larger"])
def test_memory_of_another_size_is_left_alone(count):
    buffers = HostBuffers()
    address = buffers.take((1_000_000,), torch.float32).data_ptr()
    gc.collect()
    assert buffers.take((count,), torch.float32).data_ptr() != address


def test_what_idles_longest_goes_beyond_the_limit():
    buffers = HostBuffers(max_idle_bytes=1 << 20)
    held = [buffers.take((1 << 19,), torch.uint8) for _ in range(3)]
    last = held[2].data_ptr()
    while held:
        held.pop(0)
    gc.collect()
    assert buffers.idle_bytes == 1 << 20
    again = [buffers.take((1 << 19,), torch.uint8) for _ in range(2)]
    assert last in {taken.data_ptr() for taken in again}
    assert buffers.idle_bytes == 0


def test_more_is_kept_while_the_host_cache_has_room_for_it():
    """A new version of a large adapter is then read into memory that the system need not clear again."""
    buffers, room = HostBuffers(max_idle_bytes=1 << 19), [3 << 19]
    buffers.keep_within(lambda: room[0])
    held = [buffers.take((1 << 19,), torch.uint8) for _ in range(4)]
    held.clear()
    assert buffers.idle_bytes == 3 << 19
    room[0] = -5
    large = buffers.take((1 << 22,), torch.uint8)
    assert buffers.idle_bytes == 1 << 19, "the cache has filled"
    del large


class CollectingList(list):
    """Runs the garbage collector whenever somebody goes through it."""

    def __iter__(self):
        gc.collect()
        return super().__iter__()


def test_the_garbage_collector_may_run_while_a_buffer_is_looked_for():
    """It may free cycles inside any line; a finalizer that waited for a lock held there would wait forever."""
    buffers = HostBuffers()
    cycle = [buffers.take((1 << 20,), torch.uint8)]
    cycle.append(cycle)
    address = cycle[0].data_ptr()
    buffers._idle = CollectingList([hugepages.map_memory(1 << 20)])  # noqa: SLF001 - collects in the middle of a line
    gc.disable()
    try:
        del cycle
        taken = []
        thread = threading.Thread(target=lambda: taken.append(buffers.take((1 << 20,), torch.uint8)), daemon=True)
        thread.start()
        thread.join(30)
        assert taken, "it hangs"
    finally:
        gc.enable()
    assert buffers.take((1 << 20,), torch.uint8).data_ptr() == address, "what was dropped comes back"


def test_what_is_dropped_keeps_to_the_limit_without_anybody_asking():
    buffers = HostBuffers(max_idle_bytes=1 << 20)
    held = [buffers.take((1 << 19,), torch.uint8) for _ in range(8)]
    held.clear()
    assert buffers.idle_bytes == 1 << 20
