"""Copies between ordinary host memory and an arena through a few pinned blocks, on a thread of their own.

CUDA copies ordinary memory while the caller waits. The thread waits instead: it moves the bytes between the image and a
block, and the device copies between the block and the arena.

Tests: tests/memory/transfers/test_staging.py, tests/memory/transfers/test_dma_streams.py
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, Protocol

import torch

from .copy_plan import CopyGroup, CopyRun
from .cuda_transfer import CudaTransfer
from .pinned import bytes_of

logger = logging.getLogger(__name__)

#: Size of a block: the host fills it in some tenths of a millisecond.
BLOCK_BYTES = 4 << 20

#: Two blocks, so that the host fills one while the device reads the other.
NUM_BLOCKS = 2


class StagedCopies(Protocol):
    """The methods of `CudaCopies` that staging calls."""

    @property
    def lock(self) -> threading.RLock: ...

    def issue(self, image: torch.Tensor, group: CopyGroup, to_device: bool) -> Any: ...
    def synchronize(self, event: Any) -> None: ...
    def staged(self) -> Sequence[CudaTransfer]: ...


class Staging:
    """Issues the copies of transfers whose image lies in ordinary memory; lowest layers of all transfers first,
    and those that nobody waits for last.
    """

    def __init__(
        self,
        memory: Sequence[Any],
        is_ordinary: Callable[[torch.Tensor], bool],
        synchronize: Callable[[Any], None],
    ) -> None:
        """memory: pinned buffers of one size, in bytes; they are kept. is_ordinary: of a tensor on the host.
        synchronize: makes the host wait for an event.
        """
        self._memory = memory
        self.is_ordinary = is_ordinary
        self._synchronize = synchronize
        blocks = [torch.frombuffer(each, dtype=torch.uint8) for each in memory]
        self._blocks = cycle([_Block(each) for each in blocks])
        self._block_bytes = len(blocks[0])
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def join(self, copies: StagedCopies) -> None:
        """Serve these copies from now on."""
        self._copies = copies
        self._changed = threading.Condition(copies.lock)

    def wake(self) -> None:
        """Have the thread look for copies. The caller holds the copies' lock."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="chorus-staging", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def wait_for(self, is_true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Sleep until progress of the copies has made `is_true()` true; return whether it has within `timeout` seconds.
        The caller holds the copies' lock, which is free meanwhile.
        """
        return self._changed.wait_for(is_true, timeout)

    def close(self) -> None:
        """End the thread, once no transfer has copies left."""
        with self._copies.lock:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def work(self) -> bool:
        """Copy one group of a transfer; return False if none has any that can be copied."""
        with self._copies.lock:
            waiting = [
                (it.is_ahead, group.first_layer, it) for it in self._copies.staged() if (group := it.next_group())
            ]
            if not waiting:
                return False
            transfer = min(waiting, key=lambda each: each[:2])[2]
            group, image = transfer.begin_staging()
        event, is_whole = None, False
        try:
            transfer.check_image(image)
            for issued in self._pieces(transfer, group, image):
                event = issued
            is_whole = not transfer.has_failed()
        except Exception:  # the transfer has failed; whoever waits for it is told
            logger.exception("a copy through pinned memory failed")
        with self._copies.lock:
            transfer.end_staging(event, is_whole)
            self._changed.notify_all()
        return True

    def _pieces(self, transfer: CudaTransfer, group: CopyGroup, image: torch.Tensor) -> Iterator[Any]:
        """Copy a group in pieces that fit in a block; the event of each. Ends early if the transfer has ended."""
        host, itemsize, to_device = bytes_of(image), image.itemsize, transfer.to_device
        for runs in _cut(group.runs, self._block_bytes // itemsize):
            block = next(self._blocks)
            self._synchronize_last(block)
            pinned, first, placed = block.memory.numpy(), 0, list[CopyRun]()
            parts: list[tuple[slice, slice]] = []
            for run in runs:
                placed.append(CopyRun(first, run.arena_elem, run.num_elems))
                in_block, in_image = first * itemsize, run.image_elem * itemsize
                length = run.num_elems * itemsize
                parts.append((slice(in_block, in_block + length), slice(in_image, in_image + length)))
                first += run.num_elems
            if to_device:
                for in_block, in_image in parts:
                    pinned[in_block] = host[in_image]
            with self._copies.lock:
                if transfer.has_failed():
                    return
                piece = CopyGroup(group.first_layer, group.last_layer, tuple(placed))
                block.event = event = self._copies.issue(block.memory, piece, to_device)
            yield event
            if not to_device:
                self._synchronize_last(block)
                for in_block, in_image in parts:
                    host[in_image] = pinned[in_block]

    def _synchronize_last(self, block: _Block) -> None:
        if block.event is not None:
            self._synchronize(block.event)
            block.event = None

    def _run(self) -> None:
        while True:
            try:
                if self.work():
                    continue
            except Exception:  # of the driver, which fails for all: the next step says so
                logger.exception("copies through pinned memory failed")
                time.sleep(_REST_SECONDS)
            with self._copies.lock:
                if self._is_closed:
                    return
                self._changed.wait_for(lambda: self._is_closed or bool(self._has_work()))

    def _has_work(self) -> bool:
        return any(transfer.next_group() is not None for transfer in self._copies.staged())


#: Seconds of rest after an error of the driver.
_REST_SECONDS = 0.1


class _Block:
    """A pinned block."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.event: Any = None
        """Of the copies that read or write it; None if they are complete."""


def _cut(runs: Sequence[CopyRun], most_elems: int) -> Iterator[list[CopyRun]]:
    """Divide runs into lists of at most `most_elems` elements."""
    piece, room = list[CopyRun](), most_elems
    for run in runs:
        done = 0
        while done < run.num_elems:
            count = min(room, run.num_elems - done)
            piece.append(CopyRun(run.image_elem + done, run.arena_elem + done, count))
            done, room = done + count, room - count
            if room == 0:
                yield piece
                piece, room = [], most_elems
    if piece:
        yield piece
