"""Direct memory access between host and arena: which copies and which host buffers a machine gets."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..host.buffers import Buffers, HostBuffers
from .cuda_copies import GROUP_BYTES, CudaCopies
from .cuda_driver import CupyDriver, MissingCupy
from .host_copies import HostCopies
from .pinned import CupyPinnedMemory, PinnedBuffers, TorchPinnedMemory
from .transfer import CopyEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dma:
    """copies: what moves images. buffers: where images that it moves fast should be read to."""

    copies: CopyEngine
    buffers: Buffers


def open_dma(pages: torch.Tensor, pinned_limit_bytes: int, group_bytes: int = GROUP_BYTES) -> Dma:
    """For an arena `[num_pages, page_elems]`: CuPy's streams and pinned memory on a GPU, plain copies on a CPU.

    A GPU without CuPy is served too, by copies that the host waits for; a warning names the extra to install.
    """
    if not pages.is_cuda:
        return Dma(HostCopies(pages), HostBuffers())
    index = pages.get_device()
    try:
        copies = CudaCopies(pages, CupyDriver(index), group_bytes)
        return Dma(copies, PinnedBuffers(CupyPinnedMemory(index), pinned_limit_bytes))
    except MissingCupy as error:
        logger.warning("adapters load without overlap: %s", error)
        return Dma(HostCopies(pages), PinnedBuffers(TorchPinnedMemory(), pinned_limit_bytes))
