"""Copies and transfers: on the CPU, and on a device that a test drives."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.host.buffers import HostBuffers
from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.transfers.copy_plan import CopyPlan
from chorus.memory.transfers.cuda_copies import MOST_QUEUED, CudaCopies
from chorus.memory.transfers.cuda_driver import CupyDriver, MissingCupy
from chorus.memory.transfers.cuda_transfer import LAYERS_AHEAD
from chorus.memory.transfers.dma import open_dma
from chorus.memory.transfers.host_copies import HostCopies
from chorus.memory.transfers.pinned import CupyPinnedMemory
from chorus.memory.transfers.transfer import ExecutorLost

from ...tables import llama_table
from ..adapter_layouts import NUM_LAYERS, adapter_layouts
from ..fake_cuda import FakeDriver

DIMS = {"q_proj": (12, 8)}
PAGE_ELEMS = 32
PAGES = [7, 2, 3]


def plain_layout(layers: int = 4) -> AdapterLayout:
    """One row of 20 elements per layer, so that rows straddle pages of 32."""
    part = AdapterPart(1, 1.0, tuple(range(layers)), ("q_proj",))
    return AdapterLayout.build([part], llama_table(layers, DIMS), PAGE_ELEMS, 4)


def arena(num_pages: int = 10) -> torch.Tensor:
    return torch.zeros(num_pages, PAGE_ELEMS, dtype=torch.int32)


def numbered_image(num_pages: int = 3) -> torch.Tensor:
    return torch.arange(1, num_pages * PAGE_ELEMS + 1, dtype=torch.int32).view(num_pages, PAGE_ELEMS)


def whole(data: object, num_layers: int = 4) -> HostImage:
    """An image that has been read."""
    image = HostImage()
    image.data = data
    image.publish(num_layers)
    return image


def unread(data: object = None) -> HostImage:
    """An image of which no layer has been published."""
    image = HostImage()
    image.data = data
    return image


def has_layer(
    pages: torch.Tensor, image: torch.Tensor, layout: AdapterLayout, layer: int, places: list[int] = PAGES
) -> bool:
    here, there = image.view(-1), pages[places].view(-1)
    return all(torch.equal(here[begin:end], there[begin:end]) for begin, end in layout.layer_ranges(layer))


# -- on the CPU


def test_an_inline_load_is_done_when_it_started():
    pages, image, layout = arena(), numbered_image(), plain_layout()
    transfer = HostCopies(pages).start(whole(image), layout, PAGES)
    assert transfer.is_done()
    assert transfer.is_quiet()
    assert all(has_layer(pages, image, layout, layer) and transfer.wait_layer(layer) for layer in range(4))
    assert not pages[[0, 1, 4, 5, 6, 8, 9]].any()


@given(st.data(), st.integers(2, 12).map(lambda n: 4 * n))
def test_inline_loads_move_every_element_of_any_layout(data, page_elems):
    layout = data.draw(adapter_layouts(page_elems))
    where = data.draw(st.permutations(range(layout.num_pages + 2)))[: layout.num_pages]
    pages = torch.zeros(layout.num_pages + 2, page_elems, dtype=torch.int32)
    image = torch.arange(1, layout.num_pages * page_elems + 1, dtype=torch.int32).view(-1, page_elems)
    HostCopies(pages).start(whole(image, layout.num_layers), layout, where)
    assert torch.equal(pages[where].view(-1)[: layout.num_elems], image.view(-1)[: layout.num_elems])


def test_a_layer_waits_for_the_disk_and_no_longer_than_asked():
    pages, image, layout = arena(), numbered_image(), plain_layout()
    read = unread()
    transfer = HostCopies(pages).start(read, layout, PAGES)
    assert not transfer.wait_layer(0)
    read.data = image
    read.publish(2)
    assert transfer.wait_layer(1)
    assert has_layer(pages, image, layout, 1)
    assert not has_layer(pages, image, layout, 2)
    assert not transfer.is_done()
    threading.Timer(0.02, read.publish, [4]).start()
    assert transfer.wait_layer(3, timeout=60)
    assert has_layer(pages, image, layout, 3)
    assert transfer.is_done()


def test_a_failed_read_ends_the_transfer():
    copies, image = HostCopies(arena()), unread(numbered_image())
    transfer = copies.start(image, plain_layout(), PAGES)
    image.publish(1)
    assert transfer.wait_layer(0)
    image.fail(OSError("gone"))
    assert not transfer.wait_layer(0, timeout=60)
    assert not transfer.wait_layer(3, timeout=60)
    assert (transfer.has_failed(), transfer.is_done(), transfer.is_quiet()) == (True, False, True)
    held = weakref.ref(image)
    del image
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("copies", [HostCopies, lambda pages: CudaCopies(pages, FakeDriver())])
def test_pages_go_out(copies):
    pages = arena()
    pages.view(-1)[:] = torch.arange(pages.numel(), dtype=torch.int32)
    before, image = pages.clone(), torch.zeros(4, PAGE_ELEMS, dtype=torch.int32)
    copies(pages).copy_out([8, 1, 2, 5], image)
    assert torch.equal(image, before[[8, 1, 2, 5]])
    assert torch.equal(pages, before)
    with pytest.raises(ValueError, match=r"image must be \[3, 32\], torch.int32, contiguous and on the host"):
        copies(pages).copy_out([8, 1, 2], image)


def test_a_reading_thread_issues_each_layer_as_it_comes():
    pages, data, layout, content = arena(), torch.zeros_like(numbered_image()), plain_layout(), numbered_image()
    image = unread()
    transfer = HostCopies(pages).start(image, layout, PAGES)

    def read() -> None:
        image.data = data
        for layer in range(4):
            for begin, end in layout.layer_ranges(layer):
                data.view(-1)[begin:end] = content.view(-1)[begin:end]
            image.publish(layer + 1)

    reader = threading.Thread(target=read)
    reader.start()
    for layer in range(4):
        assert transfer.wait_layer(layer, timeout=60)
        assert has_layer(pages, content, layout, layer)
    reader.join()
    assert transfer.is_done()


@pytest.mark.parametrize("end", ["done", "cancelled", "failed"])
def test_an_image_forgets_a_transfer_that_has_ended(end):
    """It may stay in host memory for long."""
    image = unread(numbered_image())
    transfer = HostCopies(arena()).start(image, plain_layout(), PAGES)
    image.publish(2)
    {
        "done": lambda: image.publish(4),
        "cancelled": transfer.cancel,
        "failed": lambda: image.fail(OSError("gone")),
    }[end]()
    assert transfer.is_quiet()
    held = weakref.ref(transfer)
    del transfer
    assert held() is None


def test_one_image_goes_to_several_places():
    pages, image, layout = arena(), unread(numbered_image()), plain_layout()
    copies = HostCopies(pages)
    transfers = [copies.start(image, layout, where) for where in ([0, 1, 2], [7, 8, 9])]
    image.publish(4)
    assert all(transfer.is_done() for transfer in transfers)
    assert torch.equal(pages[[0, 1]], numbered_image()[:2])
    assert torch.equal(pages[[7, 8]], numbered_image()[:2])


def test_cancelling_from_another_thread_never_lets_a_copy_slip_out():
    layout, data = plain_layout(), numbered_image()
    for _ in range(50):
        pages, image = arena(), unread(data)
        transfer = HostCopies(pages).start(image, layout, PAGES)

        def read(image=image) -> None:
            for layer in range(4):
                image.publish(layer + 1)

        reader = threading.Thread(target=read)
        reader.start()
        transfer.cancel()
        then = pages.clone()
        reader.join()
        assert torch.equal(pages, then)
        assert transfer.is_quiet()


def test_what_does_not_fit_is_refused_by_name():
    copies = HostCopies(arena())
    with pytest.raises(ValueError, match="the adapter has 3 pages, 2 pages of the arena were given"):
        copies.start(whole(numbered_image()), plain_layout(), [1, 2])
    with pytest.raises(ValueError, match="page 10 is not one of the arena's 10 pages"):
        copies.start(whole(numbered_image()), plain_layout(), [1, 2, 10])
    for image in (numbered_image(2), numbered_image().float(), numbered_image(6)[::2]):
        with pytest.raises(ValueError, match=r"image must be \[3, 32\], torch.int32, contiguous and on the host"):
            copies.start(whole(image), plain_layout(), PAGES)
        with pytest.raises(ValueError, match=r"image must be \[3, 32\]"):
            CudaCopies(arena(), FakeDriver()).copy_pages(image, PAGES, to_device=True)
        late = unread()
        transfer = copies.start(late, plain_layout(), PAGES)
        late.data = image
        with pytest.raises(ValueError, match=r"image must be \[3, 32\]"):
            late.publish(1)
        assert transfer.has_failed()
        held = weakref.ref(transfer)
        del transfer
        assert held() is None, "the image still tells it of layers"


# -- on a device


def test_a_layer_that_the_adapter_does_not_change_is_there_at_once():
    layout = AdapterLayout.build([AdapterPart(1, 1.0, (2,), ("q_proj",))], llama_table(4, DIMS), PAGE_ELEMS, 4)
    transfer = CudaCopies(arena(), FakeDriver()).start(unread(), layout, [5])
    assert transfer.wait_layer(0)
    assert transfer.wait_layer(3)
    assert not transfer.wait_layer(2)
    transfer.cancel()
    assert not transfer.wait_layer(0)


def test_copies_are_issued_ahead_but_the_compute_stream_waits_for_its_layer_only():
    driver, pages, image, layout = FakeDriver(), arena(), numbered_image(6), plain_layout(9)
    groups = CopyPlan.of_layers(layout, [4, 2, 3, 0, 1, 5], PAGE_ELEMS).groups
    transfer = CudaCopies(pages, driver, group_bytes=0).start(whole(image, 9), layout, [4, 2, 3, 0, 1, 5])
    at_once = driver.num_copies
    assert at_once == sum(len(group.runs) for group in groups[: 1 + LAYERS_AHEAD]), "the link is not left idle"
    assert transfer.wait_layer(0)
    assert driver.num_copies == sum(len(group.runs) for group in groups[: 1 + LAYERS_AHEAD]) < 9
    seen = []
    driver.launch(lambda: seen.append(pages[4, :20].tolist()))
    driver.run(driver.compute, 100)
    assert seen == [], "the compute stream waits, the host did not"
    driver.run(1, 3)  # the fence, the first layer's copy, its event
    driver.run(driver.compute, 100)
    assert seen == [image.view(-1)[:20].tolist()]
    assert not transfer.is_done()
    transfer.synchronize()
    assert transfer.is_done()


class FullDriver(FakeDriver):
    """A device whose streams take 1,000 entries: the host would wait with the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def memcpy_async(self, *args) -> None:
        super().memcpy_async(*args)
        self.most = max(self.most, *map(len, self.queues.values()))
        assert self.most <= 1000, "the host waits for a full stream"


def scattered(pages: torch.Tensor, layers: int = 330) -> tuple[AdapterLayout, list[int], torch.Tensor]:
    """An adapter of two copies a layer, whose pages are apart; its image."""
    part = AdapterPart(2, 1.0, tuple(range(layers)), ("q_proj",))
    layout = AdapterLayout.build([part], llama_table(layers, DIMS), PAGE_ELEMS, 4)
    return layout, list(range(len(pages) - 2, 0, -2))[: layout.num_pages], numbered_image(layout.num_pages)


def test_copies_of_large_loads_never_fill_a_stream_and_all_arrive():
    """All copies of a load were issued in one call: 640 for one of rank 256 in scattered pages."""
    driver, pages = FullDriver(), arena(2000)
    copies = CudaCopies(pages, driver, group_bytes=0)
    layout, places, image = scattered(pages)
    assert sum(len(group.runs) for group in CopyPlan.of_layers(layout, places, PAGE_ELEMS).groups) > 640
    transfers = [copies.start(whole(image, 330), layout, places) for _ in range(3)]
    for _ in range(5):
        copies.advance()
    before = driver.num_copies
    assert 0.5 * MOST_QUEUED < before <= MOST_QUEUED
    for _ in range(100):  # each time, a step's worth of copies is done
        driver.run(driver.compute, 100)
        driver.run(copies.streams[True], 100)
        copies.advance()
        if all(transfer.is_done() for transfer in transfers):
            break
    driver.finish()
    assert all(transfer.is_done() for transfer in transfers)
    assert all(has_layer(pages, image, layout, layer, places) for layer in range(330))
    assert driver.most <= 2 * MOST_QUEUED + 10, "copies and events"


def test_a_step_that_needs_a_layer_issues_it_though_the_stream_has_no_room():
    driver, pages = FullDriver(), arena(2000)
    copies = CudaCopies(pages, driver, group_bytes=0)
    layout, places, image = scattered(pages)
    first, second = (copies.start(whole(image, 330), layout, places) for _ in range(2))
    copies.advance()
    before = driver.num_copies
    assert second.wait_layer(200)
    assert driver.num_copies > before
    assert not first.is_done()
    first.synchronize()
    driver.finish()
    assert first.is_done()
    assert all(has_layer(pages, image, layout, layer, places) for layer in range(330))


@pytest.mark.parametrize("copies_before_failure", [0, 1, 3])
def test_an_adapter_whose_copies_are_refused_is_still_when_the_caller_hears_of_it(copies_before_failure):
    driver = FakeDriver()
    copies = CudaCopies(arena(), driver, group_bytes=0)
    driver.copies_before_failure = copies_before_failure
    with pytest.raises(RuntimeError, match="no copy"):
        copies.start(whole(numbered_image(6), 9), plain_layout(9), [4, 2, 3, 0, 1, 5])
    assert driver.num_copies == copies_before_failure
    assert not driver.pending_copies(), "its pages and its image have other owners now"


def test_layers_that_share_an_event_are_copied_once_all_of_them_are_read():
    driver, image = FakeDriver(), unread(numbered_image())
    transfer = CudaCopies(arena(), driver, group_bytes=3 * 80).start(image, plain_layout(), PAGES)
    image.publish(1)
    copies_of_the_first = driver.num_copies
    assert copies_of_the_first > 0
    for num_ready in (2, 3):
        image.publish(num_ready)
        assert not transfer.wait_layer(1)
        assert driver.num_copies == copies_of_the_first
    image.publish(4)
    assert driver.num_copies > copies_of_the_first
    assert all(transfer.wait_layer(layer) for layer in range(4))
    waits = [event for event in driver.queues[driver.compute] if event[0] == "wait"]
    assert [waits[-3][1] is event[1] for event in waits[-3:]] == [True] * 3, "the last three share one"


def test_a_layer_whose_event_fired_costs_the_compute_stream_nothing():
    driver = FakeDriver()
    transfer = CudaCopies(arena(), driver).start(whole(numbered_image()), plain_layout(), PAGES)
    transfer.synchronize()
    driver.finish()
    assert all(transfer.wait_layer(layer) for layer in range(4))
    assert not driver.queues[driver.compute]


def test_a_step_brings_the_first_layers_of_all_loads_before_the_later_ones():
    driver, order = FakeDriver(), []
    copies = CudaCopies(arena(30), driver, group_bytes=0)
    begun, num_layers = 1 + LAYERS_AHEAD, 3 + LAYERS_AHEAD  # by the start of each, and in all
    layout = plain_layout(num_layers)
    images = [numbered_image(layout.num_pages) for _ in range(3)]
    places = [[10 * i + 2 * page % 9 for page in range(layout.num_pages)] for i in range(3)]
    transfers = [
        copies.start(whole(image, num_layers), layout, pages) for image, pages in zip(images, places, strict=True)
    ]
    first_byte = {
        image.data_ptr() + 4 * 20 * layer: (layer, i) for i, image in enumerate(images) for layer in range(num_layers)
    }
    driver.on_copy = lambda copy: order.append(first_byte[copy.source]) if copy.source in first_byte else None
    copies.advance()
    assert order == [(layer, i) for layer in range(begun, num_layers) for i in range(3)]
    driver.finish()
    assert all(transfer.is_done() for transfer in transfers)


def test_a_refused_copy_ends_the_transfer_with_none_of_its_group_running():
    driver, pages = FakeDriver(), arena()
    copies = CudaCopies(pages, driver, group_bytes=1 << 20)
    image = unread(numbered_image())
    image.publish(1)
    transfer = copies.start(image, plain_layout(), PAGES)
    image.stream.publish(4)  # before its reader tells anybody
    driver.copies_before_failure = 1
    with pytest.raises(RuntimeError, match="no copy"):
        copies.advance()
    assert driver.num_copies == 2
    assert not driver.pending_copies()
    assert transfer.has_failed()
    assert not transfer.wait_layer(3)
    assert transfer.is_quiet()
    driver.copies_before_failure = -1
    copies.advance()
    assert driver.num_copies == 2


@pytest.mark.parametrize("copies_before_failure", [0, 1, 2])
def test_pages_that_cannot_be_moved_are_still_when_the_caller_hears_of_it(copies_before_failure):
    driver = FakeDriver()
    copies = CudaCopies(arena(), driver, group_bytes=0)
    driver.copies_before_failure = copies_before_failure
    with pytest.raises(RuntimeError, match="no copy"):
        copies.copy_pages(numbered_image(4), [1, 3, 5, 7], to_device=True)
    assert driver.num_copies == copies_before_failure
    assert not driver.pending_copies()


def test_closing_cancels_and_waits():
    driver, pages = FakeDriver(), arena()
    copies = CudaCopies(pages, driver, group_bytes=0)
    image = unread(numbered_image())
    image.publish(1)
    transfer = copies.start(image, plain_layout(), PAGES)
    assert driver.num_copies == 1
    copies.close()
    assert not driver.pending_copies()
    assert transfer.is_quiet()
    assert not transfer.is_done()
    image.publish(4)
    copies.advance()
    assert driver.num_copies == 1


# -- which copies a machine gets


def test_a_cpu_gets_plain_copies_and_ordinary_buffers():
    dma = open_dma(arena(), 1 << 30)
    assert isinstance(dma.copies, HostCopies)
    assert isinstance(dma.buffers, HostBuffers)
    buffer = dma.buffers.take((3, PAGE_ELEMS), torch.int32).copy_(numbered_image())
    assert dma.copies.start(whole(buffer), plain_layout(), PAGES).is_done()


def test_a_gpu_has_pinned_memory_from_the_start(monkeypatch):
    """The first adapter's read would wait for the system otherwise, and so would a request."""
    granted = []
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(
        "chorus.memory.transfers.dma.TorchPinnedMemory",
        lambda: SimpleNamespace(allocate=lambda size: granted.append(size) or bytearray(8), trim=lambda: None),
    )
    pages = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", None, raising=False)
    open_dma(pages, 1 << 30)
    assert sum(granted) == 1 << 30


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13"), (None, "cuda13")])
def test_missing_cupy_names_the_extra(monkeypatch, cuda, extra):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(MissingCupy, match=rf"pip install 'chorus-lora\[{extra}\]'"):
        CupyDriver(0)


def test_an_error_of_the_device_is_not_taken_for_a_copy_under_way(monkeypatch):
    """Else whoever waits for it would wait for ever."""

    class CUDARuntimeError(Exception):
        pass

    status = 0
    runtime = SimpleNamespace(eventQuery=lambda ptr: status, CUDARuntimeError=CUDARuntimeError)
    cuda = SimpleNamespace(runtime=runtime, Device=lambda index: nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    driver = CupyDriver(0)
    event = SimpleNamespace(ptr=1)
    assert driver.query(event) is True
    status = 600  # cudaErrorNotReady
    assert driver.query(event) is False
    status = 700  # cudaErrorIllegalAddress
    with pytest.raises(CUDARuntimeError, match="700"):
        driver.query(event)


CALLS = {
    "query": lambda driver, memory, event: driver.query(event),
    "synchronize": lambda driver, memory, event: driver.synchronize(event),
    "record": lambda driver, memory, event: driver.record(event, 1),
    "wait": lambda driver, memory, event: driver.wait_event(1, event),
    "event": lambda driver, memory, event: driver.new_event(),
    "copy": lambda driver, memory, event: driver.memcpy_async(1, 2, 3, True, 4),
    "pin": lambda driver, memory, event: memory.allocate(1),
    "trim": lambda driver, memory, event: memory.trim(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("failure", [None, "an illegal memory access"])
def test_an_error_after_which_the_device_does_nothing_more_is_final(monkeypatch, failure, call):
    """Any call may be told, on any thread; an error after which the device works is the caller's."""

    class CUDARuntimeError(Exception):
        status = 700

    def refuse(*_):
        raise CUDARuntimeError

    names = "memcpyAsync", "eventRecord", "streamWaitEvent", "eventSynchronize"
    runtime = SimpleNamespace(
        **dict.fromkeys(names, refuse),
        eventQuery=lambda ptr: 700,
        memcpyHostToDevice=1,
        CUDARuntimeError=CUDARuntimeError,
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda index: nullcontext(),
        Event=lambda disable_timing: refuse(),
        PinnedMemoryPool=lambda: SimpleNamespace(malloc=refuse, free_all_blocks=refuse),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    driver, memory = CupyDriver(0, lambda: failure), CupyPinnedMemory(0, failure=lambda: failure)
    with pytest.raises(CUDARuntimeError if failure is None else ExecutorLost):
        CALLS[call](driver, memory, SimpleNamespace(ptr=1))


def test_layers_beyond_the_model_are_an_error():
    with pytest.raises(IndexError):
        CudaCopies(arena(), FakeDriver()).start(whole(numbered_image()), plain_layout(), PAGES).wait_layer(NUM_LAYERS)
