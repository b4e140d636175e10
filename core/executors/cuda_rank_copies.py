"""Copies of all ranks' images between host memory and the arenas of several GPUs.

The first rank owns the images, in shared memory, and tells the others which bytes to copy where. Each rank copies its
share, on its own streams, in the order of its steps. A copy is done when it is done on every rank. The copies of an
adapter begin when all of it has been read. Then no clock decides whether a layer is present when a step needs it, so
all ranks agree.

Tests: tests/core/executors/test_cuda_ranks.py
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...memory.files.manifest import AdapterManifest
from ...memory.host.image import HostImage, LayerStream
from ...memory.pages.adapter_layout import AdapterLayout
from ...memory.pages.arena import Arena
from ...memory.transfers.dma import RESERVED_BYTES
from ...memory.transfers.pinned import PinnedBuffers
from ...memory.transfers.transfer import ExecutorLost, Transfer, check_pages
from .adapters import check_tables
from .base import ModelExecutor
from .cuda import CudaExecutor
from .cuda_rank_memory import COMING, DONE, FAILED, NUM_COPIES, VOID, DeviceRankContext
from .rank_adapters import RankAdapters, RankBuffers
from .shared_memory import SharedMemory

logger = logging.getLogger(__name__)

#: Seconds between two checks of a copy that the host waits for.
_LOOK_SECONDS = 5e-4


class RankTransfer:
    """A copy on all ranks; `begin` starts this rank's share once the others have been told of theirs.

    stream: of the image, which may still be being read.
    """

    address = 0

    def __init__(
        self, copies: RankCopies, begin: Callable[[int], Transfer], stream: LayerStream, num_layers: int
    ) -> None:
        self._copies, self._begin, self._stream, self._num_layers = copies, begin, stream, num_layers
        self._own: Transfer | None = None
        self._is_cancelled = False
        self.number: int | None = None
        """Number of the copy, once it has begun."""
        self.advance()

    def advance(self) -> None:
        """Begin if all of the image has been read."""
        if self._own is None and not self._is_cancelled and self._stream.num_ready == self._num_layers:
            self.number = number = self._copies.take(self)
            self._own = self._begin(number)

    def wait_layer(self, layer: int, timeout: float = 0.0) -> bool:
        return self._own is not None and self._own.wait_layer(layer, timeout)

    def is_done(self) -> bool:
        self.advance()
        return self._own is not None and self._own.is_done() and bool((self._others() == DONE).all())

    def has_failed(self) -> bool:
        if self._own is None:
            return self._is_cancelled or self._stream.num_ready == LayerStream.FAILED
        return self._own.has_failed() or bool(np.isin(self._others(), (FAILED, VOID)).any())

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._own is not None:
            self._own.cancel()
            self._copies.send("cancel", self.number)

    def is_quiet(self) -> bool:
        if self._own is None:
            return self.has_failed()
        return self._own.is_quiet() and (self._copies.is_lost or bool(np.isin(self._others(), (DONE, VOID)).all()))

    def _others(self) -> np.ndarray:
        return self._copies.states[1:, self.number]


class RankCopies:
    """Numbered copies on all ranks, of images of all ranks; see `CopyEngine`.

    send: sends a message that needs no reply to all other ranks.
    """

    is_background = False
    """Each copy is a message to every rank."""

    def __init__(
        self, rank_context: DeviceRankContext, first: CudaExecutor, send: Callable[..., None], patience: float
    ) -> None:
        self.states, self.send, self.first = rank_context.states, send, first
        self._rank_context, self._memory, self._patience = rank_context, rank_context.memory, patience
        self._free = list(range(NUM_COPIES))

    @property
    def is_lost(self) -> bool:
        """True if other ranks may have ended: then nothing is computed any more in the pages that they copy."""
        return self._rank_context.is_lost

    def take(self, transfer: RankTransfer) -> int:
        """Take a number for a copy, until its transfer object is freed."""
        if not self._free:
            raise RuntimeError(f"{NUM_COPIES} copies are already in flight")
        number = self._free.pop()
        self.states[:, number] = COMING
        weakref.finalize(transfer, self._free.append, number).atexit = False
        return number

    def start(self, image: HostImage, layout: AdapterLayout, pages: Sequence[int]) -> RankTransfer:
        check_pages(pages, layout.num_pages, self.first.num_pages)
        pages = list(pages)

        def begin(number: int) -> Transfer:
            self.send("place", number, *self._places(image.data), layout, pages)
            return self.first.adapters.start(_whole(image.data[0], layout.num_layers), layout, pages)

        return RankTransfer(self, begin, image.stream, layout.num_layers)

    def copy_pages(
        self, image: torch.Tensor, pages: Sequence[int], *, to_device: bool, ahead: bool = False
    ) -> RankTransfer:
        pages = list(pages)

        def begin(number: int) -> Transfer:
            self.send("copy", number, *self._places(image), pages, to_device)
            return self.first.adapters.copy_pages(image[0], pages, to_device=to_device)

        whole = LayerStream()
        whole.publish(len(pages))
        return RankTransfer(self, begin, whole, len(pages))

    def copy_out(self, pages: Sequence[int], image: torch.Tensor) -> None:
        """Copy whole pages to the host; raises ExecutorLost if that fails or takes too long."""
        transfer = self.copy_pages(image, pages, to_device=False)
        deadline = time.monotonic() + self._patience
        while not transfer.is_done():
            if transfer.has_failed() or time.monotonic() > deadline:
                raise ExecutorLost("a rank could not copy its pages")
            time.sleep(_LOOK_SECONDS)

    def advance(self) -> None:
        """Does nothing: each rank advances its own copies in its steps."""

    def close(self) -> None:
        """Does nothing: ranks that have ended copy nothing."""

    def _places(self, image: torch.Tensor) -> tuple[list[int], tuple[int, int]]:
        """Return the byte offset of each rank's share in the shared memory, and the chunk: its first byte and size."""
        first = self._memory.offset(image)
        assert first is not None
        offsets = [first + rank * image.stride(0) * image.itemsize for rank in range(len(image))]
        chunks = list(self._memory.chunks.items())
        return offsets, next((begin, size) for begin, size in chunks if begin <= first < begin + size)


class CudaRankAdapters(RankAdapters):
    """Adapter backend of several GPUs: it refuses adapters that the static tables of a GPU can't hold."""

    def __init__(self, shapes: ModelExecutor, copies: RankCopies, memory: SharedMemory, max_rank: int) -> None:
        """shapes: of a rank's share."""
        arena, size = copies.first.arena, memory.layout.size
        host = Arena(arena.layout, 2, arena.pages.dtype, "cpu")
        pinned = PinnedBuffers(memory, memory.layout.room_bytes)
        pinned.reserve(min(memory.layout.room_bytes, RESERVED_BYTES))
        copies.send("pin", list(memory.chunks.items()))  # so that no step waits for a rank that pins them
        buffers = RankBuffers(pinned, size, memory)
        base = shapes.base_weights
        super().__init__(shapes.whole, shapes.config, arena=host, copies=copies, buffers=buffers, size=size, base=base)
        self._max_rank = max_rank

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        manifest = super().inspect(path, roots)
        check_tables(manifest, path, self._max_rank)
        return manifest

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        check_tables(manifest, manifest.path, self._max_rank)  # a composed one was never inspected
        return super().layout(manifest)


class TpWorkerCopies:
    """The copies in flight on a TP worker."""

    def __init__(self, rank_context: DeviceRankContext, executor: CudaExecutor, pinning: Any) -> None:
        self._rank_context, self._executor, self._pinning = rank_context, executor, pinning
        self._states = rank_context.states[rank_context.shard.rank]
        self._transfers: dict[int, Transfer] = {}
        self._pinned: dict[int, int] = {}  # sizes of pinned chunks, by first byte
        page, dtype = executor.layout.page_elems, executor.arena.pages.dtype
        self._page_elems, self._dtype = page, dtype

    def get(self, number: int) -> Transfer | None:
        """Return a copy, or None if it has ended."""
        return self._transfers.get(number)

    def pin(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Pin chunks of the first rank: first byte and size of each."""
        for chunk in chunks:
            self._pin(*chunk)

    def place(
        self, number: int, offsets: list[int], chunk: tuple[int, int], layout: AdapterLayout, pages: list[int]
    ) -> None:
        image = _whole(self._image(offsets, chunk, len(pages)), layout.num_layers)
        self._begin(number, lambda: self._executor.adapters.start(image, layout, pages))

    def copy(self, number: int, offsets: list[int], chunk: tuple[int, int], pages: list[int], to_device: bool) -> None:
        image = self._image(offsets, chunk, len(pages))
        self._begin(number, lambda: self._executor.adapters.copy_pages(image, pages, to_device=to_device))

    def cancel(self, number: int) -> None:
        if (transfer := self._transfers.get(number)) is not None:
            transfer.cancel()

    def look(self) -> bool:
        """Publish the progress of the copies; return True if any is in flight."""
        for number, transfer in list(self._transfers.items()):
            if transfer.is_done():
                self._states[number] = DONE
            elif transfer.has_failed():
                self._states[number] = VOID if transfer.is_quiet() else FAILED
            if self._states[number] in (DONE, VOID):
                del self._transfers[number]
        return bool(self._transfers)

    def _begin(self, number: int, begin: Callable[[], Transfer]) -> None:
        try:
            self._transfers[number] = begin()
        except ExecutorLost:
            raise
        except Exception:
            self._states[number] = VOID
            raise

    def _image(self, offsets: Sequence[int], chunk: tuple[int, int], num_pages: int) -> torch.Tensor:
        self._pin(*chunk)
        offset = offsets[self._rank_context.shard.rank]
        return self._rank_context.memory.tensor(offset, (num_pages, self._page_elems), self._dtype)

    def _pin(self, chunk: int, num_bytes: int) -> None:
        """Pin a chunk of the first rank, replacing overlapping chunks that it no longer has. Memory that the system
        refuses to pin is copied while the host waits.
        """
        if self._pinning is None or self._pinned.get(chunk) == num_bytes:
            return
        for begin, size in list(self._pinned.items()):
            if begin < chunk + num_bytes and chunk < begin + size:
                self._pinning.unpin(self._rank_context.memory.address(begin))
                del self._pinned[begin]
        try:
            self._pinning.pin(self._rank_context.memory.address(chunk), num_bytes)
        except MemoryError as error:
            logger.warning("cannot pin %d bytes of host memory (%s); adapters load slower", num_bytes, error)
        else:
            self._pinned[chunk] = num_bytes


def _whole(data: torch.Tensor, num_layers: int) -> HostImage:
    """Make an image that has been read completely."""
    image = HostImage()
    image.data = data
    image.publish(num_layers)
    return image
