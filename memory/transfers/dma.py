"""Direct memory access between host and arena: which copies and which host buffers a machine gets."""

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
from .transfer import CopyEngine

logger = logging.getLogger(__name__)

#: Most host memory that is pinned before the first adapter is read: pinning it takes about a second, chosen so that a
#: start does not take notably longer by it. What reads need beyond is pinned a chunk at a time.
RESERVED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Dma:
    """copies: what moves images. buffers: where images that it moves fast should be read to."""

    copies: CopyEngine
    buffers: Buffers


def open_dma(
    pages: torch.Tensor,
    pinned_limit_bytes: int,
    group_bytes: int = GROUP_BYTES,
    failure: Callable[[], str | None] = lambda: None,
) -> Dma:
    """For an arena `[num_pages, page_elems]`: CuPy's streams and pinned memory on a GPU, plain copies on a CPU.

    failure: tells why the GPU does nothing more for this process, None while it works.
    A GPU without CuPy is served too, by copies that the host waits for; a warning names the extra to install.
    """
    if not pages.is_cuda:
        return Dma(HostCopies(pages), HostBuffers())
    index = pages.get_device()
    try:
        copies: CopyEngine = CudaCopies(pages, CupyDriver(index, failure), group_bytes)
        memory: PinnedMemory = CupyPinnedMemory(index, failure=failure)
    except MissingCupy as error:
        logger.warning("adapters load without overlap: %s", error)
        copies, memory = HostCopies(pages), TorchPinnedMemory()
    buffers = PinnedBuffers(memory, pinned_limit_bytes)
    reserved = buffers.reserve(min(pinned_limit_bytes, RESERVED_BYTES))
    logger.info("%d of at most %d MiB of host memory are pinned for adapters", reserved >> 20, pinned_limit_bytes >> 20)
    return Dma(copies, buffers)
