"""Copies on a device whose streams run as late and in as bad an order as they may."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout
from chorus.memory.transfers.cuda_copies import CudaCopies
from chorus.memory.transfers.cuda_transfer import CudaTransfer

from ..adapter_layouts import NUM_LAYERS, adapter_layouts
from ..fake_cuda import Copy, FakeDriver
from .pumped_staging import PumpedStaging

GARBAGE = -1


@dataclass(eq=False)
class Load:
    """A transfer as a test sees it. image is the reader's hold on its image, gone when the read has ended."""

    transfer: CudaTransfer
    pages: list[int]
    expected: np.ndarray  # [num_pages, page_elems]
    layout: AdapterLayout | None = None
    image: HostImage | None = None
    num_published: int = NUM_LAYERS
    is_cancelled: bool = False
    has_failed: bool = False

    def __repr__(self) -> str:
        return f"Load(pages={self.pages}, {self.num_published} layers, {self.is_cancelled=}, {self.has_failed=})"


class Streams(RuleBasedStateMachine):
    """Loads come, go on, fail and are cancelled while the streams stand still or run.

    Every value that is ever written is another one, so that a byte in the wrong place or of the wrong time shows. A
    page's former owner still writes and reads it on the compute stream when the page changes hands. An image turns into
    garbage the moment that nobody holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.driver = FakeDriver()
        self.driver.on_copy = self._check_copy
        self.loads: list[Load] = []
        self.values = itertools.count(1)
        self.num_released = 0
        self.num_images = 0

    @initialize(
        page_elems=st.integers(2, 15).map(lambda n: 4 * n),
        group_elems=st.sampled_from([0, 50, 150, 1000]),
        block_elems=st.sampled_from([0, 7, 64, 1000]),
    )
    def open(self, page_elems, group_elems, block_elems):
        """block_elems: of the pinned blocks through which images are copied; 0: images are pinned."""
        self.page_elems = page_elems
        self.pages = torch.full((400, page_elems), GARBAGE, dtype=torch.int32)
        self.arena = self.pages.numpy()
        blocks = [bytearray(4 * block_elems) for _ in range(2)]
        self.staging = PumpedStaging(blocks, self.driver.synchronize) if block_elems else None
        self.engine = CudaCopies(self.pages, self.driver, group_bytes=4 * group_elems, staging=self.staging)
        self.free = list(range(len(self.pages)))

    # -- loads

    @rule(data=st.data(), is_streamed=st.booleans())
    def start(self, data, is_streamed):
        layout = data.draw(adapter_layouts(self.page_elems))
        if layout.num_pages > len(self.free):
            return
        pages = self._take_pages(layout.num_pages, data.draw(st.randoms(use_true_random=False)))
        expected = self._new_values(layout.num_pages)
        image = HostImage()
        if not is_streamed:
            image.data = self._new_image(expected)
            image.publish(NUM_LAYERS)
        transfer = self.engine.start(image, layout, pages)
        load = Load(transfer, pages, expected, layout, image, 0 if is_streamed else NUM_LAYERS)
        self.loads.append(load)
        self._drop_image_when_read(load)

    @rule(data=st.data(), num_pages=st.integers(1, 12), to_device=st.booleans())
    def copy_pages(self, data, num_pages, to_device):
        if num_pages > len(self.free):
            return
        pages = self._take_pages(num_pages, data.draw(st.randoms(use_true_random=False)))
        expected = self._new_values(num_pages)
        if to_device:
            image = self._new_image(expected)
        else:
            image = self._new_image(np.full_like(expected, GARBAGE))
            self.driver.launch(lambda: self.arena.__setitem__(pages, expected))
        transfer = self.engine.copy_pages(image, pages, to_device=to_device)
        if to_device:
            self.loads.append(Load(transfer, pages, expected))
        else:
            self._move_out(transfer, image, pages, expected)

    @precondition(lambda self: self._unread())
    @rule(data=st.data(), tells=st.booleans())
    def read_a_layer(self, data, tells):
        """tells: whether the reader lets the transfer know at once."""
        self._read_layer(data.draw(st.sampled_from(self._unread())), tells)

    @precondition(lambda self: self._unread())
    @rule(data=st.data())
    def fail_to_read(self, data):
        load = data.draw(st.sampled_from(self._unread()))
        load.image.fail(OSError())
        load.has_failed, load.image = True, None

    @rule()
    def advance(self):
        self.engine.advance()

    @precondition(lambda self: self.staging is not None)
    @rule()
    def stage(self):
        """The thread that copies ordinary memory gets to run."""
        assert self.staging is not None
        self.staging.work()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def cancel(self, data):
        load = data.draw(st.sampled_from(self.loads))
        load.transfer.cancel()
        load.is_cancelled = True

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), layer=st.integers(0, NUM_LAYERS - 1))
    def wait_layer(self, data, layer):
        load = data.draw(st.sampled_from(self.loads))
        if load.layout is None:
            came = load.transfer.wait()
            ranges = [(0, load.expected.size)]
        else:
            came = load.transfer.wait_layer(layer)
            ranges = load.layout.layer_ranges(layer)
        assert not came or not (load.is_cancelled or load.has_failed)
        if load.num_published == NUM_LAYERS and not load.is_cancelled:
            assert came, "all that was missing is here"
        if came:
            for begin, end in ranges:
                self.driver.launch(partial(self._check_bytes, load, begin, end))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def release(self, data):
        """The owner gives the pages of an ended load to others as soon as the transfer says so."""
        load = data.draw(st.sampled_from(self.loads))
        if load.transfer.is_done():
            assert not (load.is_cancelled or load.has_failed)
            ranges = [r for layer in range(NUM_LAYERS) for r in load.layout.layer_ranges(layer)] if load.layout else []
            for begin, end in ranges or [(0, load.expected.size)]:
                self._check_bytes(load, begin, end)
        if load.layout is not None:  # the host sees the layers that are counted without waiting
            for begin, end in itertools.chain(*map(load.layout.layer_ranges, range(load.transfer.arrived.num_ready))):
                self._check_bytes(load, begin, end)
        if not load.transfer.is_quiet():
            return
        assert load.is_cancelled or load.has_failed or load.transfer.is_done()
        copies_in = [copy for copy in self.driver.pending_copies() if copy.source_then is not None]
        assert not any(self._pages_of(copy) & set(load.pages) for copy in copies_in)
        load.image = None  # its reader ends early
        self.loads.remove(load)
        self.free += load.pages

    # -- the device

    @rule(stream=st.integers(0, 2), count=st.integers(1, 30))
    def run(self, stream, count):
        self.driver.run(stream, count)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while unread := self._unread():
            self._read_layer(unread[0], tells=False)
        for _ in range(1000):  # a stream takes only so many copies at a time
            self.engine.advance()
            if self.staging is not None:
                self.staging.work()
            self.driver.finish()
            if all(load.transfer.is_quiet() for load in self.loads):
                break
        for load in self.loads:
            assert load.transfer.is_quiet()
            assert load.transfer.is_done() == (not load.is_cancelled and not load.has_failed)
        self.engine.advance()
        assert self.num_released == self.num_images, "an image is held though nothing reads it"
        self.engine.close()

    # -- helpers

    def _unread(self) -> list[Load]:
        return [load for load in self.loads if load.image is not None]

    def _read_layer(self, load: Load, tells: bool) -> None:
        assert load.image is not None and load.layout is not None
        if load.image.data is None:
            load.image.data = self._new_image(np.full_like(load.expected, GARBAGE))
        for begin, end in load.layout.layer_ranges(load.num_published):
            load.image.data.view(-1)[begin:end] = torch.from_numpy(load.expected).view(-1)[begin:end]
        load.num_published += 1
        if tells:
            load.image.publish(load.num_published)
        else:
            load.image.stream.publish(load.num_published)
        self._drop_image_when_read(load)

    def _drop_image_when_read(self, load: Load) -> None:
        if load.num_published == NUM_LAYERS:
            load.image = None

    def _new_values(self, num_pages: int) -> np.ndarray:
        count = num_pages * self.page_elems
        first = next(self.values)
        self.values = itertools.count(first + count)
        return np.arange(first, first + count, dtype=np.int32).reshape(num_pages, self.page_elems)

    def _new_image(self, content: np.ndarray) -> torch.Tensor:
        """A tensor that is the last to hold its memory's owner; the memory itself stays, to be filled with garbage."""
        memory = content.copy()
        owner = memory[:]
        self.num_images += 1
        weakref.finalize(owner, self._on_image_gone, memory)
        return torch.from_numpy(owner)

    def _on_image_gone(self, memory: np.ndarray) -> None:
        memory.fill(GARBAGE)
        self.num_released += 1

    def _take_pages(self, count: int, random) -> list[int]:
        """Pages whose former owner's last step has yet to run."""
        random.shuffle(self.free)
        pages, self.free = self.free[:count], self.free[count:]
        value = next(self.values)

        def check() -> None:
            assert (self.arena[pages] == value).all(), "a page was overwritten under its former owner"

        self.driver.launch(lambda: self.arena.__setitem__(pages, value))
        self.driver.launch(check)
        return pages

    def _move_out(self, transfer: CudaTransfer, image: torch.Tensor, pages: list[int], expected: np.ndarray) -> None:
        """Pages that leave the arena get their next owner after `wait` on the compute stream, without a check."""
        host = image.numpy()
        assert transfer.wait()

        def next_owner() -> None:
            assert (host == expected).all()
            self.arena[pages] = GARBAGE

        self.driver.launch(next_owner)
        self.free += pages

    def _check_bytes(self, load: Load, begin: int, end: int) -> None:
        found = self.arena[load.pages].reshape(-1)[begin:end]
        assert (found == load.expected.reshape(-1)[begin:end]).all(), "compute does not see the layer's bytes"

    def _pages_of(self, copy: Copy) -> set[int]:
        address = copy.target if copy.source_then is not None else copy.source
        first = address - self.pages.data_ptr()
        page_bytes = 4 * self.page_elems
        return set(range(first // page_bytes, (first + copy.num_bytes - 1) // page_bytes + 1))

    def _check_copy(self, copy: Copy) -> None:
        """A copy into a load's pages takes read bytes only, and none is issued after the end."""
        pages = self._pages_of(copy)
        for load in self.loads:
            if pages & set(load.pages):
                assert not load.is_cancelled
                assert not load.has_failed
                there = np.concatenate([load.expected[load.pages.index(page)] for page in sorted(pages)])
                first = (copy.target - self.pages.data_ptr()) // 4 - min(pages) * self.page_elems
                there = there[first : first + copy.num_bytes // 4]
                assert copy.source_then == there.tobytes(), "a layer was copied before it was read"


Streams.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestStreams = Streams.TestCase
