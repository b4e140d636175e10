"""Adapters and swapped KV of several ranks: images of all ranks' shares, and, on a CPU, their copies.

Tests: tests/core/executors/test_ranks.py
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ...memory.adapters.vectors import BaseWeights
from ...memory.files.identity import ContentHash
from ...memory.files.manifest import AdapterManifest
from ...memory.host.buffers import Buffers
from ...memory.host.image import HostImage, LayerStream
from ...memory.pages.adapter_layout import AdapterLayout, vector_elems
from ...memory.pages.arena import Arena
from ...memory.pages.projections import Projections
from ...memory.transfers.dma import Dma
from ...memory.transfers.host_copies import CompleteTransfer, HostCopies, HostTransfer
from ...memory.transfers.transfer import CopyEngine, Transfer, check_pages
from ..model.specs.config import ModelConfig
from .adapters import ModelAdapters
from .shared_memory import SharedMemory


class RankBuffers(Buffers):
    """Host memory for images of all ranks: `[ranks, pages, page_elems]`, the ranks' pages one after the other.

    memory: shared memory in which the images must be, if other processes copy them.
    """

    def __init__(self, buffers: Buffers, size: int, memory: SharedMemory | None = None) -> None:
        self._buffers, self._size, self._memory = buffers, size, memory

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Buffers.take`; shape: of a rank's share. Raises MemoryError if no memory is left."""
        image = self._buffers.take((self._size, *shape), dtype)
        if self._memory is not None and self._memory.offset(image) is None:
            raise MemoryError(f"the memory that ranks share has no room for {self._size} times {shape[0]} pages")
        return image


class RankAdapters(ModelAdapters):
    """Reads adapters once and splits them into shares of the ranks. All shares have the same layout.

    A projection split by outputs has the whole A on every rank and a share of B and of vectors; one split by inputs has
    a share of A and the whole B and scales. The ranks add up its outputs, so that the first has the offsets alone.
    """

    def __init__(
        self,
        whole: ModelConfig,
        share: ModelConfig,
        arena: Arena,
        copies: CopyEngine,
        buffers: RankBuffers,
        size: int,
        *,
        base: BaseWeights,
    ) -> None:
        """whole, share: shapes of the model, and of a rank's share of it. arena: on the host, with a rank's layout.
        copies: of images of all ranks.
        """
        dtype = arena.pages.dtype
        super().__init__(share, arena, dtype)
        self.dma = Dma(copies, buffers)
        self._whole = ModelAdapters(whole, arena, dtype, base=base)
        self._parts = [{each.name: each.share(rank, size) for each in whole.projections} for rank in range(size)]
        self._projections = whole.projections, share.projections

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        return self._whole.inspect(path, roots)

    def read(
        self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage, content: ContentHash | None = None
    ) -> None:
        """Read the file once, and cut each layer's shares as soon as it is read."""
        whole_layout, whole = self._whole.layout(manifest), HostImage()
        shares = image.take(self.dma.buffers, (layout.num_pages, self._page.page_elems), self._dtype)
        done = 0

        def cut() -> None:
            nonlocal done
            ready = whole.stream.num_ready
            for layer in range(done, ready):
                for rank, (share, parts) in enumerate(zip(shares, self._parts, strict=True)):
                    images = (whole_layout, whole.data), (layout, share)
                    _cut(manifest, layer, *images, parts=parts, projections=self._projections)
                    _cut_vectors(manifest, layer, *images, parts=parts, projections=self._projections, rank=rank)
            done = ready
            image.publish(ready)

        whole.follow(cut)
        self._whole.read(manifest, whole_layout, whole, content)


class ArenaCopies:
    """Copies between images of all ranks and their arenas, which are all in this process's memory; see `CopyEngine`."""

    is_background = False

    def __init__(self, arenas: Sequence[Arena], counts: np.ndarray) -> None:
        """counts: see `CpuRankContext`."""
        self._copies = [HostCopies(arena.pages) for arena in arenas]
        self._num_pages = arenas[0].num_pages
        self._counts = counts
        self._free_counts = list(range(len(counts)))

    def start(self, image: HostImage, layout: AdapterLayout, pages: Sequence[int]) -> HostTransfer:
        check_pages(pages, layout.num_pages, self._num_pages)
        if not self._free_counts:
            raise RuntimeError(f"{len(self._counts)} adapters are already being copied into the arenas")
        at = self._free_counts.pop()
        self._counts[at] = 0
        transfer = HostTransfer(self, image, layout, pages, LayerStream(self._counts[at : at + 1]))
        weakref.finalize(transfer, self._free_counts.append, at).atexit = False
        return transfer

    def copy_in(self, image: torch.Tensor, ranges: Sequence[tuple[int, int]], pages: Sequence[int]) -> None:
        for copies, share in zip(self._copies, image, strict=True):
            copies.copy_in(share, ranges, pages)

    def copy_out(self, pages: Sequence[int], image: torch.Tensor) -> None:
        for copies, share in zip(self._copies, image, strict=True):
            copies.copy_out(pages, share)

    def copy_pages(
        self, image: torch.Tensor, pages: Sequence[int], *, to_device: bool, ahead: bool = False
    ) -> CompleteTransfer:
        for copies, share in zip(self._copies, image, strict=True):
            copies.copy_pages(share, pages, to_device=to_device)
        return CompleteTransfer()

    def count_of(self, transfer: Transfer) -> int:
        """Index, in the ranks' memory, of the transfer's count of arrived layers."""
        return (transfer.address - self._counts.ctypes.data) // self._counts.itemsize

    def advance(self) -> None:
        """Does nothing: readers issue copies as layers come."""

    def close(self) -> None:
        """Does nothing: no copy is running, and no more begin once the reads have ended."""


def _cut(
    manifest: AdapterManifest,
    layer: int,
    whole: tuple[AdapterLayout, torch.Tensor],
    share: tuple[AdapterLayout, torch.Tensor],
    parts: Mapping[str, tuple[slice, tuple[slice, ...]]],
    projections: tuple[Projections, Projections],
) -> None:
    """Copy a rank's part of a layer.

    whole, share: layout and elements. parts: the rank's inputs, and parts of the outputs, of each projection.
    projections: the whole ones and the shares.
    """
    layouts = zip(manifest.parts, whole[0].parts, share[0].parts, strict=True)
    for part, from_part, to_part in layouts:
        if from_part.first_elem[layer] < 0:
            continue
        source, target = (
            data.view(-1)[layout.first_elem[layer] :][: layout.layer_elems].view(part.num_rows, -1)
            for layout, (_, data) in ((from_part, whole), (to_part, share))
        )
        for name in part.targets:
            m = projections[0].id(name)
            (d_in, d_out), (to_in, to_out) = (each[name].dims for each in projections)
            inputs, outputs = parts[name]
            a, b = from_part.slabs.a_offset[m], from_part.slabs.b_offset[m]
            to_a, to_b = to_part.slabs.a_offset[m], to_part.slabs.b_offset[m]
            target[:, to_a : to_a + to_in] = source[:, a : a + d_in][:, inputs]
            rows = source[:, b : b + d_out]
            share_of_rows = torch.cat([rows[:, each] for each in outputs], 1)
            target[:, to_b : to_b + to_out][:, : share_of_rows.shape[1]] = share_of_rows


def _cut_vectors(
    manifest: AdapterManifest,
    layer: int,
    whole: tuple[AdapterLayout, torch.Tensor],
    share: tuple[AdapterLayout, torch.Tensor],
    parts: Mapping[str, tuple[slice, tuple[slice, ...]]],
    projections: tuple[Projections, Projections],
    rank: int,
) -> None:
    """Copy a rank's part of a layer's vectors; see `_cut`."""
    (from_layout, source), (to_layout, target) = whole, share
    vectors, to_vectors = from_layout.vectors, to_layout.vectors
    if vectors is None or to_vectors is None:
        return
    names = [each.module for each in manifest.vectors if each.layer == layer]
    for name, is_offset in itertools.product(names, (False, True)):
        projection, m = projections[0][name], projections[0].id(name)
        at, to = (each.first_elem[layer][m] for each in (vectors, to_vectors))
        found = _vector(source, at, projection.outputs, is_offset)
        own = torch.cat([found[each] for each in parts[name][1]])
        if is_offset and rank and projection.is_row_parallel:
            own.zero_()
        _vector(target, to, len(own), is_offset).copy_(own)


def _vector(data: torch.Tensor, first: int, outputs: int, is_offset: bool) -> torch.Tensor:
    """A module's scales, or its offsets, in an image. first: where the scales begin."""
    stride = vector_elems(outputs, data.itemsize)
    first += is_offset * stride
    return data.view(-1)[first : first + stride].view(torch.float32)[:outputs]
