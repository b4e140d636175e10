"""Pinned buffers: cut from chunks, given back when nobody looks at them, never above the limit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.transfers.pinned import UNIT_BYTES, CupyPinnedMemory, Extents, PinnedBuffers

PAGE_ELEMS = 2048
PAGE_BYTES = UNIT_BYTES
DTYPE = torch.bfloat16


class HostMemory:
    """Memory that a custom allocator gives CuPy's pool, which asks for `ptr` and `size`."""

    def __init__(self, blocks: Blocks, size: int) -> None:
        self._blocks, self._array, self.size = blocks, np.full(size, 7, np.uint8), size
        self.ptr = self._array.ctypes.data
        blocks.num_bytes += size

    def __del__(self) -> None:
        self._array.fill(0)
        self._blocks.num_bytes -= self.size


class Blocks:
    """Counts what the pool holds of the system's memory, and grants no more than `capacity` of it."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.num_bytes = 0
        self.capacity = capacity

    def __call__(self, size: int):
        from cupy.cuda import PinnedMemoryPointer, runtime

        if self.num_bytes + size > self.capacity:
            raise runtime.CUDARuntimeError(2)  # cudaErrorMemoryAllocation
        return PinnedMemoryPointer(HostMemory(self, size), 0)


class PlainMemory:
    """Pinned memory without CuPy."""

    def __init__(self) -> None:
        self.num_trims = 0

    def allocate(self, num_bytes: int) -> bytearray:
        return bytearray(num_bytes)

    def trim(self) -> None:
        self.num_trims += 1


def cupy_buffers(blocks: Blocks, limit_pages: int, chunk_pages: int = 8) -> PinnedBuffers:
    pytest.importorskip("cupy")
    memory = CupyPinnedMemory(None, blocks)
    return PinnedBuffers(memory, limit_pages * PAGE_BYTES, chunk_pages * PAGE_BYTES)


def take(buffers: PinnedBuffers, num_pages: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return buffers.take((num_pages, PAGE_ELEMS), dtype)


def test_cupys_pool_gives_and_takes_back():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=16)
    three, five = take(buffers, 3), take(buffers, 5)
    assert three.shape == (3, PAGE_ELEMS)
    assert three.dtype == DTYPE
    assert three.is_contiguous()
    assert (three.view(torch.uint8) == 7).all(), "the pool's own memory, not a copy"
    assert (buffers.num_bytes_used, buffers.num_bytes_held) == (8 * PAGE_BYTES, 8 * PAGE_BYTES)
    address = three.data_ptr()
    del three
    assert buffers.num_bytes_used == 5 * PAGE_BYTES
    assert take(buffers, 3).data_ptr() == address
    assert blocks.num_bytes == 8 * PAGE_BYTES
    assert five.data_ptr() != address


def test_a_tensor_need_not_be_pages():
    buffers = cupy_buffers(Blocks(), limit_pages=8)
    one, two = buffers.take((3, 5), torch.float32).fill_(1), buffers.take((), torch.int8).fill_(2)
    assert (one.shape, one.dtype, two.shape, two.dtype) == ((3, 5), torch.float32, (), torch.int8)
    assert (one == 1).all()
    assert buffers.num_bytes_used == 2 * UNIT_BYTES


def test_any_view_keeps_a_buffer():
    buffers = cupy_buffers(Blocks(), limit_pages=8)
    view = take(buffers, 2).view(-1)[5:9].view(torch.int16)
    assert buffers.num_bytes_used == 2 * PAGE_BYTES
    del view
    assert buffers.num_bytes_used == 0


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


def test_the_pool_rounds_to_powers_of_two_and_chunks_waste_none_of_it():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=64, chunk_pages=8)
    images = [take(buffers, 5) for _ in range(6)]
    assert buffers.num_bytes_held == blocks.num_bytes == 6 * 8 * PAGE_BYTES
    images.append(take(buffers, 3))
    assert buffers.num_bytes_held == 6 * 8 * PAGE_BYTES, "an earlier chunk's rest serves"
    images.append(take(buffers, 9))
    assert buffers.num_bytes_held == blocks.num_bytes == (6 * 8 + 16) * PAGE_BYTES
    assert buffers.num_unpinned == 0


def test_what_exceeds_the_limit_is_ordinary_memory():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=8)
    pinned = take(buffers, 6)
    ordinary = take(buffers, 3)
    assert ordinary.shape == (3, PAGE_ELEMS)
    assert buffers.num_unpinned == 1
    assert (buffers.num_bytes_used, blocks.num_bytes) == (pinned.nbytes, 8 * PAGE_BYTES)


def test_unused_chunks_give_way_to_a_larger_one():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=32)
    small = [take(buffers, 8) for _ in range(4)]
    del small[1:]
    large = take(buffers, 12)
    assert (large.view(torch.uint8) == 7).all()
    assert blocks.num_bytes == buffers.num_bytes_held == (8 + 16) * PAGE_BYTES


def test_chunks_stay_when_giving_them_up_would_not_help():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=16)
    used, unused = take(buffers, 8), take(buffers, 8)
    del unused
    assert take(buffers, 12) is not None
    assert buffers.num_unpinned == 1
    assert blocks.num_bytes == 16 * PAGE_BYTES
    assert used.shape[0] == 8


def test_a_small_limit_makes_small_chunks():
    blocks = Blocks()
    buffers = cupy_buffers(blocks, limit_pages=4, chunk_pages=1 << 20)
    assert take(buffers, 3) is not None
    assert (buffers.num_unpinned, blocks.num_bytes) == (0, 4 * PAGE_BYTES)


def test_a_system_that_grants_no_more_is_served_with_ordinary_memory(caplog):
    blocks = Blocks(capacity=8 * PAGE_BYTES)
    buffers = cupy_buffers(blocks, limit_pages=64)
    images = [take(buffers, 8), take(buffers, 8)]
    assert [image.shape[0] for image in images] == [8, 8]
    assert buffers.num_unpinned == 1
    assert "cannot pin 32768 bytes" in caplog.text


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
        assert buffers.num_bytes_used <= buffers.num_bytes_held <= 64 * PAGE_BYTES
    live.clear()
    assert buffers.num_bytes_used == 0


def test_threads_get_buffers_of_their_own():
    buffers = PinnedBuffers(PlainMemory(), 256 * PAGE_BYTES, 32 * PAGE_BYTES)
    start = threading.Barrier(4)

    def work(seed: int) -> bool:
        start.wait()
        good = True
        for i in range(200):
            value = 4 * i + seed
            one, two = (take(buffers, 1 + i % n, torch.int16).fill_(value) for n in (7, 3))
            good &= bool((one == value).all() and (two == value).all())
        return good

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert buffers.num_bytes_used == 0
    assert buffers.num_unpinned == 0


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
