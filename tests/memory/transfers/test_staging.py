"""Copies of images in ordinary memory: through pinned blocks, on a thread of their own."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from chorus.memory.host.image import HostImage
from chorus.memory.transfers import dma
from chorus.memory.transfers.cuda_copies import CudaCopies
from chorus.memory.transfers.dma import Dma, open_dma
from chorus.memory.transfers.pinned import UNIT_BYTES

from ..fake_cuda import FakeDriver
from .pumped_staging import PumpedStaging

PAGE_ELEMS, NUM_PAGES = 1 << 10, 64


class PromptDriver(FakeDriver):
    """Copies as CUDA does: of pinned memory, and of ordinary memory while the caller waits, which it counts."""

    def __init__(self):
        super().__init__()
        self.blocks: list[tuple[int, int]] = []
        self.waits: list[str] = []
        self.refuses = False

    def allocate(self, num_bytes):
        memory = bytearray(num_bytes)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.blocks.append((first, first + num_bytes))
        return memory

    def trim(self):
        pass

    def record(self, event, stream):
        event.record = [True]

    def wait_event(self, stream, event):
        pass

    def memcpy_async(self, target, source, num_bytes, to_device, stream):
        if self.refuses:
            raise RuntimeError("no copy")
        host = source if to_device else target
        if not any(first <= host < end for first, end in self.blocks):
            self.waits.append(threading.current_thread().name)
        ctypes.memmove(target, source, num_bytes)


@pytest.fixture
def driver() -> PromptDriver:
    return PromptDriver()


@pytest.fixture
def arena() -> torch.Tensor:
    return torch.zeros(NUM_PAGES, PAGE_ELEMS, dtype=torch.int32)


@pytest.fixture
def opened(driver, arena, monkeypatch):
    """What a GPU with one page of pinned memory for images gets."""
    monkeypatch.setattr(dma, "CupyDriver", lambda index, failure: driver)
    monkeypatch.setattr(dma, "CupyPinnedMemory", lambda index, failure: driver)
    names = {name: getattr(arena, name) for name in ("shape", "itemsize", "dtype", "data_ptr")}
    found = open_dma(SimpleNamespace(is_cuda=True, get_device=lambda: 0, **names), UNIT_BYTES)
    yield found
    found.copies.close()


def filled(opened: Dma, num_pages: int, first: int = 1) -> torch.Tensor:
    image = opened.buffers.take((num_pages, PAGE_ELEMS), torch.int32)
    assert opened.buffers.is_slow(image)
    return image.copy_(torch.arange(first, first + image.numel(), dtype=torch.int32).view(image.shape))


def wait_until_done(transfer) -> None:
    transfer.synchronize()
    assert transfer.is_done()


def test_a_step_copies_no_ordinary_memory_itself(opened, driver, arena):
    """CUDA would make it wait for each copy, with the lock held that readers need."""
    images = [filled(opened, 8, first) for first in (1, 1 << 20, 1 << 21)]
    places = [list(range(first, 48, 3)) for first in range(3)]
    transfers = [
        opened.copies.copy_pages(image, pages[:8], to_device=True) for image, pages in zip(images, places, strict=True)
    ]
    opened.copies.advance()
    for transfer in transfers:
        wait_until_done(transfer)
    assert driver.waits == []
    for image, pages in zip(images, places, strict=True):
        assert torch.equal(arena[pages[:8]], image)


def test_kv_is_swapped_to_ordinary_memory_likewise(opened, driver, arena):
    arena.copy_(torch.arange(arena.numel(), dtype=torch.int32).view(arena.shape))
    image = opened.buffers.take((5, PAGE_ELEMS), torch.int32)
    transfer = opened.copies.copy_pages(image, [9, 1, 2, 30, 4], to_device=False)
    wait_until_done(transfer)
    assert driver.waits == []
    assert torch.equal(image, arena[[9, 1, 2, 30, 4]])


def test_pages_larger_than_a_block_go_in_pieces(arena):
    driver = FakeDriver()
    staging = PumpedStaging([bytearray(1000), bytearray(1000)], driver.synchronize)
    copies = CudaCopies(arena, driver, staging=staging)
    image = torch.arange(3 * PAGE_ELEMS, dtype=torch.int32).view(3, -1)
    transfer = copies.copy_pages(image, [5, 6, 2], to_device=True)
    assert driver.num_copies == 0
    while staging.work():
        pass
    driver.finish()
    assert transfer.is_done()
    assert torch.equal(arena[[5, 6, 2]], image)


def test_a_cancelled_copy_is_quiet_once_its_piece_has_left_the_block(arena):
    """The thread had the lock free when the request ended."""
    driver = FakeDriver()
    staging = PumpedStaging([bytearray(1000), bytearray(1000)], driver.synchronize)
    copies = CudaCopies(arena, driver, staging=staging)
    transfer = copies.copy_pages(torch.ones(3, PAGE_ELEMS, dtype=torch.int32), [5, 6, 2], to_device=True)
    driver.on_copy = lambda copy: (transfer.cancel(), found.append(transfer.is_quiet()))
    found: list[bool] = []
    staging.work()
    assert found == [False]
    assert driver.num_copies == 1
    assert not transfer.is_quiet()
    driver.finish()
    assert transfer.is_quiet()


@pytest.mark.parametrize("to_device", [True, False])
def test_a_refused_copy_fails_its_transfer_alone(opened, driver, arena, to_device, caplog):
    driver.refuses = True
    transfer = opened.copies.copy_pages(filled(opened, 4), [1, 2, 3, 4], to_device=to_device)
    transfer.synchronize()
    assert transfer.has_failed()
    assert transfer.is_quiet()
    assert "no copy" in caplog.text
    driver.refuses = False
    wait_until_done(opened.copies.copy_pages(filled(opened, 4), [1, 2, 3, 4], to_device=to_device))


def test_pages_that_could_not_be_saved_are_an_error(opened, driver):
    driver.refuses = True
    with pytest.raises(RuntimeError, match="2 pages could not be copied to ordinary memory"):
        opened.copies.copy_out([1, 2], opened.buffers.take((2, PAGE_ELEMS), torch.int32))


def test_an_image_is_checked_on_the_thread(opened, caplog):
    image = HostImage()
    image.data = filled(opened, 4).view(8, -1)
    transfer = opened.copies.copy_pages(image.data, [1, 2, 3, 4], to_device=True)
    transfer.synchronize()
    assert transfer.has_failed()
    assert "image must be [4, 1024]" in caplog.text


def test_a_step_waits_for_a_layer_that_is_being_staged(opened, arena):
    """As for one that is being read: at most so many seconds."""
    image = filled(opened, 4)
    transfer = opened.copies.copy_pages(image, [1, 2, 3, 4], to_device=True)
    assert transfer.wait(timeout=600)
    assert torch.equal(arena[1:5], image)


def test_without_pinned_memory_the_host_waits(monkeypatch, driver, arena, caplog):
    def allocate(num_bytes):
        raise MemoryError("none")

    driver.allocate = allocate
    monkeypatch.setattr(dma, "CupyDriver", lambda index, failure: driver)
    monkeypatch.setattr(dma, "CupyPinnedMemory", lambda index, failure: driver)
    names = {name: getattr(arena, name) for name in ("shape", "itemsize", "dtype", "data_ptr")}
    found = open_dma(SimpleNamespace(is_cuda=True, get_device=lambda: 0, **names), UNIT_BYTES)
    assert found.copies.copy_pages(filled(found, 2), [1, 2], to_device=True).is_done()
    assert set(driver.waits) == {threading.current_thread().name}
    assert "steps wait for copies of ordinary memory" in caplog.text


def test_what_nobody_waits_for_is_staged_after_all_others(arena):
    driver = FakeDriver()
    staging = PumpedStaging([bytearray(1 << 16), bytearray(1 << 16)], driver.synchronize)
    copies = CudaCopies(arena, driver, staging=staging)
    assert copies.is_background
    image = torch.ones(2, PAGE_ELEMS, dtype=torch.int32)
    ahead = copies.copy_pages(image[:1], [5], to_device=False, ahead=True)
    swap = copies.copy_pages(torch.ones(40, PAGE_ELEMS, dtype=torch.int32), list(range(6, 46)), to_device=False)
    while not swap.is_done():
        assert not ahead.is_done()
        staging.work()
        driver.finish()
    while staging.work():
        driver.finish()
    assert ahead.is_done()


def test_without_pinned_blocks_copies_are_not_in_the_background(arena):
    """The host would wait for those of ordinary memory."""
    assert not CudaCopies(arena, FakeDriver()).is_background
