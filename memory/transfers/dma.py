"""Direct memory access between host and arena: selects the copy engine and host buffers of a machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..host.buffers import Buffers, HostBuffers
from .cuda_copies import GROUP_BYTES, CudaCopies
from .cuda_driver import CupyDriver, MissingCupy
from .host_copies import HostCopies
from .pinned import CupyPinnedMemory, PinnedBuffers, PinnedMemory, TorchPinnedMemory
from .staging import BLOCK_BYTES, NUM_BLOCKS, Staging
from .transfer import CopyEngine

logger = logging.getLogger(__name__)

#: The most host memory that is pinned before the first adapter is read. Pinning it takes about a second; it was chosen
#: to keep the start short. Further memory is pinned one chunk at a time, when reads need it.
RESERVED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Dma:
    """The copy engine and host buffers of a machine."""

    copies: CopyEngine
    """Moves images."""
    buffers: Buffers
    """Where to read images that it should move fast."""


def open_dma(
    pages: torch.Tensor,
    pinned_limit_bytes: int,
    group_bytes: int = GROUP_BYTES,
    failure: Callable[[], str | None] = lambda: None,
) -> Dma:
    """Select the engine for an arena `[num_pages, page_elems]`: CuPy streams and pinned memory on a GPU, plain copies
    on a CPU.

    failure: returns the reason why the GPU no longer works for this process, or None. A GPU without CuPy also works,
    with copies that the host waits for; a warning names the extra to install.
    """
    if not pages.is_cuda:
        return Dma(HostCopies(pages), HostBuffers())
    index = pages.get_device()
    try:
        driver, memory = CupyDriver(index, failure), CupyPinnedMemory(index, failure=failure)
    except MissingCupy as error:
        logger.warning("adapters load without overlap: %s", error)
        copies: CopyEngine = HostCopies(pages)
        buffers = PinnedBuffers(TorchPinnedMemory(), pinned_limit_bytes)
    else:
        buffers = PinnedBuffers(memory, pinned_limit_bytes)
        staging = _open_staging(memory, buffers, driver) if pinned_limit_bytes else None
        copies = CudaCopies(pages, driver, group_bytes, staging)
    reserved = buffers.reserve(min(pinned_limit_bytes, RESERVED_BYTES))
    logger.info("%d of at most %d MiB of host memory are pinned for adapters", reserved >> 20, pinned_limit_bytes >> 20)
    return Dma(copies, buffers)


def _open_staging(memory: PinnedMemory, buffers: PinnedBuffers, driver: CupyDriver) -> Staging | None:
    """Pin memory through which images in ordinary memory are copied; None if the system grants none."""
    try:
        blocks = [memory.allocate(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    except MemoryError as error:
        logger.warning("no memory could be pinned (%s): steps wait for copies of ordinary memory", error)
        return None
    return Staging(blocks, buffers.is_slow, driver.synchronize)
