"""Pinned buffers: cut from chunks, given back when nobody looks at them, never above the limit."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.transfers.pinned import UNIT_BYTES, CupyPinnedMemory, Extents, PinnedBuffers

PAGE_ELEMS = 2048
PAGE_BYTES = UNIT_BYTES
SECONDS = 20
"""A deadline, not an expectation."""
DTYPE = torch.bfloat16


class Memory:
    """Memory that was granted and not given back: sizes by address."""

    def __init__(self) -> None:
        self.granted: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self.granted.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(first <= address < first + size for first, size in list(self.granted.items()))


class HostMemory:
    """Memory that a custom allocator gives CuPy's pool, which asks for `ptr` and `size`."""

    def __init__(self, blocks: Blocks, size: int) -> None:
        self._blocks, self._array, self.size = blocks, np.full(size, 7, np.uint8), size
        self.ptr = self._array.ctypes.data
        blocks.granted[self.ptr] = size

    def __del__(self) -> None:
        self._array.fill(0)
        del self._blocks.granted[self.ptr]


class Blocks(Memory):
    """Bytes that the pool holds of the system's memory, of which it grants no more than `capacity`."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        super().__init__()
        self.capacity = capacity

    def __call__(self, size: int):
        from cupy.cuda import PinnedMemoryPointer, runtime

        if self.num_bytes + size > self.capacity:
            raise runtime.CUDARuntimeError(2)  # cudaErrorMemoryAllocation
        return PinnedMemoryPointer(HostMemory(self, size), 0)


class PlainMemory(Memory):
    """Pinned memory without CuPy."""

    def allocate(self, num_bytes: int) -> np.ndarray:
        block = np.zeros(num_bytes, np.uint8)
        self.granted[block.ctypes.data] = num_bytes
        weakref.finalize(block, self.granted.pop, block.ctypes.data)
        return block

    def trim(self) -> None:
        """Allocations to which nobody refers are gone."""


def cupy_buffers(blocks: Blocks, limit_pages: int, chunk_pages: int = 8) -> PinnedBuffers:
    pytest.importorskip("cupy")
    memory = CupyPinnedMemory(None, blocks)
    return PinnedBuffers(memory, limit_pages * PAGE_BYTES, chunk_pages * PAGE_BYTES)


def take(buffers: PinnedBuffers, num_pages: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return buffers.take((num_pages, PAGE_ELEMS), dtype)


@pytest.mark.integration
def test_cupys_pool_gives_and_takes_back():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=16)
    three, five = take(buffers, 3), take(buffers, 5)
    assert three.shape == (3, PAGE_ELEMS)
    assert three.dtype == DTYPE
    assert three.is_contiguous()
    assert blocks.holds(three), "the pool's own memory, not a copy"
    address = three.data_ptr()
    del three
    assert take(buffers, 3).data_ptr() == address
    assert blocks.num_bytes == 8 * PAGE_BYTES
    assert five.data_ptr() != address


@pytest.mark.integration
def test_a_tensor_need_not_be_pages():
    buffers = cupy_buffers(Blocks(), limit_pages=8)
    one, two = buffers.take((3, 5), torch.float32).fill_(1), buffers.take((), torch.int8).fill_(2)
    assert (one.shape, one.dtype, two.shape, two.dtype) == ((3, 5), torch.float32, (), torch.int8)
    assert (one == 1).all()
    assert abs(two.data_ptr() - one.data_ptr()) == UNIT_BYTES


@pytest.mark.integration
def test_any_view_keeps_a_buffer():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=8)
    view = take(buffers, 2).view(-1)[5:9].view(torch.int16)
    assert not blocks.holds(take(buffers, 7))
    del view
    assert blocks.holds(take(buffers, 8))


@pytest.mark.integration
def test_a_buffer_outlives_the_pool():
    """CuPy's pool frees all it gave when it dies; a buffer must keep it."""
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=8)
    buffer = take(buffers, 2)
    del buffers
    assert blocks.num_bytes == 8 * PAGE_BYTES
    assert (buffer.view(torch.uint8) == 7).all()
    del buffer
    assert blocks.num_bytes == 0


@pytest.mark.integration
def test_the_pool_rounds_to_powers_of_two_and_chunks_waste_none_of_it():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=64, chunk_pages=8)
    images = [take(buffers, 5) for _ in range(6)]
    assert blocks.num_bytes == 6 * 8 * PAGE_BYTES
    images.append(take(buffers, 3))
    assert blocks.num_bytes == 6 * 8 * PAGE_BYTES, "an earlier chunk's rest serves"
    images.append(take(buffers, 9))
    assert blocks.num_bytes == (6 * 8 + 16) * PAGE_BYTES
    assert all(map(blocks.holds, images))


@pytest.mark.integration
def test_what_exceeds_the_limit_is_ordinary_memory():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=8)
    pinned = take(buffers, 6)
    ordinary = take(buffers, 3)
    assert ordinary.shape == (3, PAGE_ELEMS)
    assert (blocks.holds(pinned), blocks.holds(ordinary)) == (True, False)
    assert blocks.num_bytes == 8 * PAGE_BYTES
    assert blocks.holds(take(buffers, 2)), "what is left of the chunk serves"


def test_ordinary_memory_is_told_once(caplog):
    buffers = PinnedBuffers(PlainMemory(), 8 * PAGE_BYTES, 8 * PAGE_BYTES)
    held = [take(buffers, 6)]
    assert not caplog.records
    held += [take(buffers, 3), take(buffers, 3)]
    (record,) = caplog.records
    assert "none of the pinned host memory (at most" in record.getMessage()
    assert "raise host_cache_bytes" in record.getMessage()


def test_a_tensor_in_ordinary_memory_moves_to_pinned_memory_once_that_has_room():
    memory = PlainMemory()
    buffers = PinnedBuffers(memory, 8 * PAGE_BYTES, 8 * PAGE_BYTES)
    pinned, ordinary = take(buffers, 6), take(buffers, 3).fill_(5)
    assert (buffers.is_slow(pinned), buffers.is_slow(ordinary)) == (False, True)
    assert buffers.moved(ordinary) is None, "there is no room"
    del pinned
    moved = buffers.moved(ordinary)
    assert moved is not None
    assert memory.holds(moved)
    assert not buffers.is_slow(moved)
    assert (moved.shape, moved.dtype) == (ordinary.shape, ordinary.dtype)
    assert torch.equal(moved, ordinary)
    assert buffers.moved(moved) is None, "it is there"


def test_other_threads_take_memory_while_a_tensor_moves(monkeypatch):
    """Threads of steps take it for swapped KV: they must not wait for a copy."""
    buffers = PinnedBuffers(PlainMemory(), 8 * PAGE_BYTES, 8 * PAGE_BYTES)
    pinned, ordinary = take(buffers, 6), take(buffers, 3)
    del pinned
    copyto, taken = np.copyto, []

    def copy(target, source):
        with ThreadPoolExecutor(1) as thread:
            taken.append(thread.submit(take, buffers, 2).result(timeout=SECONDS))
        copyto(target, source)

    monkeypatch.setattr(np, "copyto", copy)
    moved = buffers.moved(ordinary)
    assert moved is not None
    assert len(taken) == 1


class SlowMemory(PlainMemory):
    """The system pins a chunk only when the test lets it. begun, go: a semaphore each, one count per chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def allocate(self, num_bytes: int) -> np.ndarray:
        self.begun.release()
        assert self.go.acquire(timeout=SECONDS)
        return super().allocate(num_bytes)


def test_other_threads_take_and_drop_memory_while_a_chunk_is_pinned():
    """Threads of steps take it for swapped KV: they must not wait until the system has pinned an adapter's chunk."""
    memory = SlowMemory()
    memory.go.release()
    buffers = PinnedBuffers(memory, 16 * PAGE_BYTES, 8 * PAGE_BYTES)
    held = take(buffers, 3)
    assert memory.begun.acquire(timeout=SECONDS)
    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(take, buffers, 8)
        try:
            assert memory.begun.acquire(timeout=SECONDS)
            address = held.data_ptr()
            del held
            small = threads.submit(take, buffers, 3).result(timeout=SECONDS)
            assert small.data_ptr() == address, "the memory dropped meanwhile"
            assert not buffers.is_slow(small)
            assert not large.done()
        finally:
            memory.go.release()
        assert memory.holds(large.result(timeout=SECONDS))
    assert memory.num_bytes == 16 * PAGE_BYTES


def test_a_thread_that_waits_for_another_s_chunk_takes_a_part_of_it():
    memory = SlowMemory()
    buffers = PinnedBuffers(memory, 8 * PAGE_BYTES, 8 * PAGE_BYTES)
    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(take, buffers, 3) for _ in range(2)]
        assert memory.begun.acquire(timeout=SECONDS)
        memory.go.release()
        images = [each.result(timeout=SECONDS) for each in taken]
    assert all(map(memory.holds, images))
    assert memory.num_bytes == 8 * PAGE_BYTES


@pytest.mark.integration
def test_unused_chunks_give_way_to_a_larger_one():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=32)
    small = [take(buffers, 8) for _ in range(4)]
    del small[1:]
    large = take(buffers, 12)
    assert blocks.holds(large)
    assert blocks.num_bytes == (8 + 16) * PAGE_BYTES


@pytest.mark.integration
def test_chunks_stay_when_giving_them_up_would_not_help():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=16)
    used, unused = take(buffers, 8), take(buffers, 8)
    del unused
    assert not blocks.holds(take(buffers, 12))
    assert blocks.num_bytes == 16 * PAGE_BYTES
    assert used.shape[0] == 8


@pytest.mark.integration
def test_a_small_limit_makes_small_chunks():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=4, chunk_pages=1 << 20)
    assert blocks.holds(take(buffers, 3))
    assert blocks.num_bytes == 4 * PAGE_BYTES


@pytest.mark.integration
def test_a_system_that_grants_no_more_is_served_with_ordinary_memory(caplog):
    blocks = Blocks(capacity=8 * PAGE_BYTES)
    buffers = cupy_buffers(blocks, limit_pages=64)
    images = [take(buffers, 8), take(buffers, 8)]
    assert [image.shape[0] for image in images] == [8, 8]
    assert list(map(blocks.holds, images)) == [True, False]
    assert "cannot pin 32768 bytes" in caplog.text


@pytest.mark.integration
def test_other_errors_of_cupy_are_not_hidden():
    pytest.importorskip("cupy")
    from cupy.cuda import runtime

    def refuse(size: int):
        raise runtime.CUDARuntimeError(1)  # cudaErrorInvalidValue

    with pytest.raises(runtime.CUDARuntimeError, match="InvalidValue"):
        CupyPinnedMemory(None, refuse).allocate(1024)


@given(st.lists(st.one_of(st.integers(1, 20), st.tuples(st.just("drop"), st.integers(0, 99))), max_size=60))
def test_live_buffers_never_share_a_byte(steps):
    memory = PlainMemory()
    buffers = PinnedBuffers(memory, 64 * PAGE_BYTES, 16 * PAGE_BYTES)
    live: list[tuple[int, torch.Tensor]] = []
    for number, step in enumerate(steps):
        if isinstance(step, int):
            live.append((number, take(buffers, step, torch.int16).fill_(number)))
        elif live:
            live.pop(step[1] % len(live))
        assert all((buffer == value).all() for value, buffer in live)
        assert memory.num_bytes <= 64 * PAGE_BYTES
    live.clear()
    assert memory.holds(take(buffers, 64)), "all of it came back"


def test_threads_get_buffers_of_their_own():
    memory = PlainMemory()
    buffers = PinnedBuffers(memory, 256 * PAGE_BYTES, 32 * PAGE_BYTES)
    start = threading.Barrier(4)

    def work(seed: int) -> bool:
        start.wait()
        good = True
        for i in range(200):
            value = 4 * i + seed
            one, two = (take(buffers, 1 + i % n, torch.int16).fill_(value) for n in (7, 3))
            good &= bool((one == value).all() and (two == value).all() and memory.holds(one) and memory.holds(two))
        return good

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert memory.holds(take(buffers, 256)), "all of it came back"


@given(st.integers(1, 40), st.lists(st.one_of(st.integers(1, 12), st.just(0)), max_size=60), st.randoms())
def test_extents_are_disjoint_and_merge(size, steps, random):
    extents = Extents(size)
    taken: dict[int, int] = {}
    for count in steps:
        if count == 0:
            if taken:
                first = random.choice(sorted(taken))
                extents.give(first, taken.pop(first))
        else:
            used = {page for first, length in taken.items() for page in range(first, first + length)}
            first = extents.take(count)
            if first is None:
                starts = range(size - count + 1)
                assert all(used & set(range(start, start + count)) for start in starts), "there was a run as long"
            else:
                assert 0 <= first <= size - count
                assert not used & set(range(first, first + count))
                taken[first] = count
        assert extents.is_free == (not taken)


def test_extents_take_the_smallest_run_that_fits():
    extents = Extents(10)
    firsts = [extents.take(count) for count in (3, 1, 2, 1, 3)]
    assert firsts == [0, 3, 4, 6, 7]
    extents.give(0, 3)
    extents.give(4, 2)
    assert extents.take(2) == 4


@pytest.mark.parametrize(
    ("limit", "asked", "pinned"), [(64, 64, 64), (64, 20, 16), (20, 64, 16), (6, 6, 4), (0, 64, 0), (64, 0, 0)]
)
def test_memory_is_pinned_before_it_is_needed(limit, asked, pinned):
    """In pages: whole chunks of 8, or the largest power of two below where the limit is less."""
    memory = PlainMemory()
    buffers = PinnedBuffers(memory, limit * PAGE_BYTES, 8 * PAGE_BYTES)
    assert buffers.reserve(asked * PAGE_BYTES) == pinned * PAGE_BYTES == memory.num_bytes
    before = set(memory.granted)
    images = [take(buffers, 4) for _ in range(pinned // 4)]
    assert set(memory.granted) == before, "no read waits until the system has pinned memory"
    assert all(memory.holds(image) for image in images)


def test_what_the_system_does_not_pin_ahead_is_no_error():
    memory = PlainMemory()
    buffers = PinnedBuffers(memory, 64 * PAGE_BYTES, 8 * PAGE_BYTES)
    memory.allocate = lambda num_bytes: (_ for _ in ()).throw(MemoryError("no more"))
    assert buffers.reserve(64 * PAGE_BYTES) == 0


class NotingMemory:
    """Ordinary memory, with the names of the threads that asked for it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def allocate(self, num_bytes):
        self.threads.append(threading.current_thread().name)
        return bytearray(num_bytes)

    def trim(self):
        pass


def test_a_thread_that_launches_steps_pins_no_chunk():
    """It gets ordinary memory at once, and another thread pins a chunk for the next tensor."""
    memory = NotingMemory()
    buffers = PinnedBuffers(memory, 64 * PAGE_BYTES, 16 * PAGE_BYTES)
    assert buffers.is_slow(buffers.take_now((3, PAGE_ELEMS), DTYPE))
    for thread in threading.enumerate():
        if thread.name == "chorus-pinning":
            thread.join(SECONDS)
    assert memory.threads == ["chorus-pinning"]
    pinned = [buffers.take_now((8, PAGE_ELEMS), DTYPE) for _ in range(2)]
    assert not any(map(buffers.is_slow, pinned))
    assert memory.threads == ["chorus-pinning"]
