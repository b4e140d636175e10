"""Adapter backend of a GPU: reads into pinned memory, copies layer by layer beside compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ...graphs.device import Device
from ...memory.files.format import AdapterFormatError, AdapterManifest
from ...memory.host.image import HostImage
from ...memory.pages.adapter_layout import AdapterLayout
from ...memory.pages.arena import Arena
from ...memory.transfers.dma import open_dma
from ...memory.transfers.transfer import Transfer
from ..model.config import ModelConfig
from ..model.lora_state_cuda import MAX_PARTS
from .base import watched
from .cpu import CpuAdapterBackend


class CudaAdapterBackend(CpuAdapterBackend):
    """Refuses what the static tables can't hold. `place` is called by the thread that launches steps."""

    def __init__(
        self, config: ModelConfig, arena: Arena, dtype: torch.dtype, device: Device, max_rank: int, pinned_bytes: int
    ) -> None:
        """pinned_bytes: most host memory that is pinned for images."""
        super().__init__(config, arena, dtype)
        self._device = device
        self._max_rank = max_rank
        self._dma = open_dma(arena.pages, pinned_bytes)
        self._buffers = self._dma.buffers

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        manifest = super().inspect(path, roots)
        if manifest.rank > self._max_rank:
            raise AdapterFormatError(
                f"{path}: has rank {manifest.rank}, above max_lora_rank {self._max_rank}; raise max_lora_rank"
            )
        if len(manifest.parts) > MAX_PARTS:
            raise AdapterFormatError(
                f"{path}: rank_pattern, alpha_pattern and layers make {len(manifest.parts)} parts that differ; "
                f"on a GPU at most {MAX_PARTS} may"
            )
        return manifest

    def place(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> Transfer | None:
        with watched(self._device):
            transfer = self._dma.copies.start(image, layout, pages)
        return None if transfer.is_done() else transfer

    def save(self, layout: AdapterLayout, pages: list[int]) -> HostImage:
        image = HostImage()
        image.data = self._buffers.take((len(pages), self._arena.layout.page_elems), self._dtype)
        with self._device.scope():
            self._dma.copies.copy_pages(image.data, pages, to_device=False).synchronize()
        image.publish(layout.num_layers)
        return image

    def advance(self) -> None:
        """Issue the next copies, and release images whose copies are complete."""
        self._dma.copies.advance()

    def close(self) -> None:
        """Wait until nothing is being copied."""
        self._dma.copies.close()
