"""Copies on a real device. Gates hold a stream until the test opens them, so nothing here depends on how fast it is.

Everything launched after a gate is launched once before: the first launch of a kernel and the first allocation of a
size may wait for the whole device, and so for the gate.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.transfers.copy_plan import CopyPlan
from chorus.memory.transfers.cuda_copies import GROUP_BYTES, CudaCopies
from chorus.memory.transfers.cuda_transfer import LAYERS_AHEAD
from chorus.memory.transfers.dma import Dma, open_dma
from chorus.memory.transfers.host_copies import HostCopies

from ...tables import llama_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

NUM_LAYERS = 8
PAGE_ELEMS = 1 << 18
NUM_PAGES = 96
DIMS = {"q_proj": (4096, 4096), "down_proj": (14336, 4096)}
LAYOUT = AdapterLayout.build(
    [
        AdapterPart(16, 1.0, tuple(range(NUM_LAYERS)), ("q_proj", "down_proj")),
        AdapterPart(5, 1.0, (2, 3, 6), ("q_proj",)),
    ],
    llama_table(NUM_LAYERS, DIMS),
    PAGE_ELEMS,
    2,
)
PAGES = [(37 * i + 11) % NUM_PAGES for i in range(LAYOUT.num_pages)]


class Gate:
    """Holds later work of a stream until `open`."""

    def __init__(self, stream: int) -> None:
        from cupy.cuda import ExternalStream

        self._opened = threading.Event()
        ExternalStream(stream).launch_host_func(lambda _: self._opened.wait(), None)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def arena() -> torch.Tensor:
    return torch.zeros(NUM_PAGES, PAGE_ELEMS, dtype=torch.bfloat16, device="cuda")


@pytest.fixture
def dma(arena) -> Iterator[Dma]:
    opened = open_dma(arena, 1 << 30)
    assert isinstance(opened.copies, CudaCopies)
    yield opened
    opened.copies.close()
    torch.cuda.synchronize()


@pytest.fixture
def gate() -> Iterator[Callable[[int], Gate]]:
    """Makes gates; whatever a test leaves closed is opened, so that a failure is not a hang."""
    gates: list[Gate] = []

    def close(stream: int) -> Gate:
        gates.append(Gate(stream))
        return gates[-1]

    yield close
    for each in gates:
        each.open()
    torch.cuda.synchronize()


def compute_stream() -> int:
    return torch.cuda.current_stream().cuda_stream or 1


def copy_stream(dma: Dma, to_device: bool = True) -> int:
    return dma.copies.streams[to_device]


def buffer(dma: Dma, num_pages: int) -> torch.Tensor:
    return dma.buffers.take((num_pages, PAGE_ELEMS), torch.bfloat16)


def whole(data: torch.Tensor) -> HostImage:
    """An image that has been read."""
    image = HostImage()
    image.data = data
    image.publish(NUM_LAYERS)
    return image


def new_image(dma: Dma, num_pages: int, seed: int = 0) -> torch.Tensor:
    image = buffer(dma, num_pages)
    generator = torch.Generator().manual_seed(seed)
    image.view(torch.int16).random_(0x3000, 0x4000, generator=generator)  # of ordinary size: no zero, no NaN
    return image


def on_device(pages: list[int]) -> torch.Tensor:
    """Page numbers with which indexing does not make the host wait, as a list would."""
    return torch.tensor(pages, device="cuda")


def layer_bytes(pages: torch.Tensor, layer: int) -> torch.Tensor:
    """The layer's elements, out of an image or out of an adapter's pages."""
    return torch.cat([pages.view(-1)[begin:end] for begin, end in LAYOUT.layer_ranges(layer)])


def test_buffers_are_pinned_and_come_back(dma):
    taken = buffer(dma, 3)
    assert taken.is_pinned()
    address = taken.data_ptr()
    assert buffer(dma, 3).data_ptr() != address, "it is in use"
    del taken
    assert address in {again.data_ptr() for again in [buffer(dma, 3), buffer(dma, 3)]}


def test_an_adapter_arrives_whole(arena, dma):
    image = new_image(dma, LAYOUT.num_pages)
    transfer = dma.copies.start(whole(image), LAYOUT, PAGES)
    assert transfer.wait()
    found = arena[PAGES].view(-1)[: LAYOUT.num_elems].cpu()
    assert torch.equal(found, image.view(-1)[: LAYOUT.num_elems])
    transfer.synchronize()
    assert transfer.is_done()
    assert transfer.is_quiet()
    others = [page for page in range(NUM_PAGES) if page not in PAGES]
    assert not arena[others].any()


def test_compute_sees_a_layer_only_after_its_copy_and_the_host_never_waits(arena, dma, gate):
    image = new_image(dma, LAYOUT.num_pages)
    where = on_device(PAGES)
    found = [torch.empty_like(layer_bytes(image, layer), device="cuda") for layer in range(NUM_LAYERS)]

    def read(layer: int) -> None:
        found[layer].copy_(layer_bytes(arena[where], layer))

    for layer in range(NUM_LAYERS):
        read(layer)
    torch.cuda.synchronize()
    closed = gate(copy_stream(dma))
    transfer = dma.copies.start(whole(image), LAYOUT, PAGES)
    for layer in range(NUM_LAYERS):
        assert transfer.wait_layer(layer)
        read(layer)
    assert not torch.cuda.current_stream().query()
    assert not transfer.is_done()
    assert not transfer.is_quiet()
    closed.open()
    torch.cuda.synchronize()
    assert all(torch.equal(found[layer].cpu(), layer_bytes(image, layer)) for layer in range(NUM_LAYERS))
    assert transfer.is_done()


def test_layers_are_right_while_the_device_is_busy(arena, dma):
    work = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    images = [new_image(dma, LAYOUT.num_pages, seed) for seed in range(3)]
    for round_ in range(4):
        places = [[(37 * i + 5 * round_ + 31 * k) % NUM_PAGES for i in range(LAYOUT.num_pages)] for k in range(3)]
        assert len({page for pages in places for page in pages}) == 3 * LAYOUT.num_pages
        where = [on_device(pages) for pages in places]
        loads = [dma.copies.start(whole(image), LAYOUT, pages) for image, pages in zip(images, places, strict=True)]
        found = []
        for layer in range(NUM_LAYERS):
            for k, load in enumerate(loads):
                assert load.wait_layer(layer)
                found.append((k, layer, layer_bytes(arena[where[k]], layer)))
            work = torch.nn.functional.normalize(work @ work)
        arena.zero_()  # the next owner's work; its copies come after
        for k, layer, there in found:
            assert torch.equal(there.cpu(), layer_bytes(images[k], layer)), (round_, k, layer)
    dma.copies.advance()
    torch.cuda.synchronize()
    dma.copies.advance()
    assert all(load.is_done() and load.is_quiet() for load in loads)


def test_wait_layer_works_on_the_stream_that_is_current(arena, dma, gate):
    image = new_image(dma, LAYOUT.num_pages)
    where, side = on_device(PAGES), torch.cuda.Stream()
    found = torch.empty_like(layer_bytes(image, 3), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        found.copy_(layer_bytes(arena[where], 3))
    side.synchronize()
    closed = gate(copy_stream(dma))
    transfer = dma.copies.start(whole(image), LAYOUT, PAGES)
    with torch.cuda.stream(side):
        assert transfer.wait_layer(3)
        found.copy_(layer_bytes(arena[where], 3))
    torch.cuda.current_stream().synchronize()  # nothing waits there
    assert not side.query()
    closed.open()
    side.synchronize()
    assert torch.equal(found.cpu(), layer_bytes(image, 3))


def test_a_load_waits_for_the_former_owners_step(arena, dma, gate):
    arena.fill_(3)
    image = new_image(dma, LAYOUT.num_pages)
    where = on_device(PAGES)
    seen = torch.empty(len(PAGES), PAGE_ELEMS, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        """The former owner writes and reads."""
        arena[PAGES[0]].add_(1)
        torch.index_select(arena, 0, where, out=seen)

    step()
    torch.cuda.synchronize()
    closed = gate(compute_stream())
    step()
    transfer = dma.copies.start(whole(image), LAYOUT, PAGES)
    dma.copies.advance()
    assert not transfer.is_done()
    closed.open()
    assert transfer.wait()
    found = arena[PAGES].view(-1)[: LAYOUT.num_elems].cpu()
    assert (seen[0] == 5).all()
    assert (seen[1:] == 3).all()
    assert torch.equal(found, image.view(-1)[: LAYOUT.num_elems])


def test_a_reader_issues_copies_while_compute_waits_layer_by_layer(arena, dma):
    content, data = new_image(dma, LAYOUT.num_pages), buffer(dma, LAYOUT.num_pages).zero_()
    image, where = HostImage(), on_device(PAGES)
    transfer = dma.copies.start(image, LAYOUT, PAGES)
    assert not transfer.wait_layer(0)

    def read() -> None:
        image.data = data
        for layer in range(NUM_LAYERS):
            for begin, end in LAYOUT.layer_ranges(layer):
                data.view(-1)[begin:end] = content.view(-1)[begin:end]
            image.publish(layer + 1)

    reader = threading.Thread(target=read)
    reader.start()
    found = []
    for layer in range(NUM_LAYERS):
        assert transfer.wait_layer(layer, timeout=60)
        found.append(layer_bytes(arena[where], layer))
    reader.join()
    assert all(torch.equal(there.cpu(), layer_bytes(content, layer)) for layer, there in enumerate(found))


def test_cancelling_stops_further_copies_and_says_when_the_last_is_over(arena, dma, gate):
    image = new_image(dma, LAYOUT.num_pages)
    closed = gate(copy_stream(dma))
    transfer = dma.copies.start(whole(image), LAYOUT, PAGES)
    transfer.cancel()
    dma.copies.advance()
    assert not transfer.wait_layer(0)
    assert not transfer.is_quiet()
    address = image.data_ptr()
    del image
    assert new_image(dma, LAYOUT.num_pages).data_ptr() != address, "a copy still reads it"
    closed.open()
    transfer.synchronize()
    assert transfer.is_quiet()
    assert not transfer.is_done()
    dma.copies.advance()
    again = [new_image(dma, LAYOUT.num_pages) for _ in range(2)]
    assert address in {taken.data_ptr() for taken in again}
    pages = arena[PAGES]
    groups = CopyPlan.of_layers(LAYOUT, PAGES, PAGE_ELEMS, GROUP_BYTES // arena.itemsize).groups
    begun = max(group.last_layer for group in groups if group.first_layer <= LAYERS_AHEAD) + 1
    assert begun < NUM_LAYERS
    assert all(layer_bytes(pages, layer).all() for layer in range(begun)), "their copies were issued before"
    assert not any(layer_bytes(pages, layer).any() for layer in range(begun, NUM_LAYERS))


def test_pages_swap_out_and_in(arena, dma, gate):
    image, pages = buffer(dma, 9), [3, 4, 5, 6, 40, 2, 90, 91, 17]
    content = torch.arange(arena.numel()).remainder_(29_989).to(torch.int16).view(NUM_PAGES, PAGE_ELEMS)
    want, content = content[pages], content.cuda()
    arena.view(torch.int16).copy_(content)
    arena.zero_()
    torch.cuda.synchronize()
    closed = gate(compute_stream())
    arena.view(torch.int16).copy_(content)
    out = dma.copies.copy_pages(image, pages, to_device=False)
    assert not out.is_done()
    assert out.wait()
    arena.zero_()  # the next owner, after the copy
    closed.open()
    out.synchronize()
    assert out.is_done()
    assert torch.equal(image.view(torch.int16), want)
    assert dma.copies.copy_pages(image, pages[::-1], to_device=True).wait()
    assert torch.equal(arena[pages[::-1]].view(torch.int16).cpu(), want)


def test_both_directions_run_beside_each_other(arena, dma, gate):
    image, leaving = new_image(dma, LAYOUT.num_pages), buffer(dma, 2)
    closed = gate(copy_stream(dma, to_device=False))
    out = dma.copies.copy_pages(leaving, [0, 1], to_device=False)
    into = dma.copies.start(whole(image), LAYOUT, PAGES)
    into.synchronize()
    assert into.is_done()
    assert not out.is_done()
    closed.open()


def test_an_image_that_is_not_pinned_arrives_too(arena, dma):
    image = new_image(dma, LAYOUT.num_pages).clone()
    assert not image.is_pinned()
    assert dma.copies.start(whole(image), LAYOUT, PAGES).wait(timeout=60)
    assert torch.equal(arena[PAGES].view(-1)[: LAYOUT.num_elems].cpu(), image.view(-1)[: LAYOUT.num_elems])
    leaving = torch.zeros_like(image)
    out = dma.copies.copy_pages(leaving, PAGES, to_device=False)
    out.synchronize()
    assert out.is_done()
    assert torch.equal(leaving.view(-1)[: LAYOUT.num_elems], image.view(-1)[: LAYOUT.num_elems])


def test_without_cupy_loads_still_work(arena, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cupy", None)
    dma = open_dma(arena, 1 << 28)
    assert isinstance(dma.copies, HostCopies)
    assert "pip install 'chorus-lora[cuda" in caplog.text
    image = new_image(dma, LAYOUT.num_pages)
    assert image.is_pinned()
    transfer = dma.copies.start(whole(image), LAYOUT, PAGES)
    assert transfer.is_done()
    assert torch.equal(arena[PAGES].view(-1)[: LAYOUT.num_elems].cpu(), image.view(-1)[: LAYOUT.num_elems])


@pytest.mark.parametrize("to_device", [True, False])
def test_bandwidth(dma, to_device, record_property):
    """Reported, not judged."""
    image, pages = buffer(dma, NUM_PAGES), list(range(NUM_PAGES))
    dma.copies.copy_pages(image, pages, to_device=to_device).synchronize()
    start = time.perf_counter()
    transfers = [dma.copies.copy_pages(image, pages, to_device=to_device) for _ in range(8)]
    transfers[-1].synchronize()
    assert all(transfer.is_done() for transfer in transfers)
    record_property("bytes_per_second", 8 * image.nbytes / (time.perf_counter() - start))
