"""Adapters of several ranks: read once, cut into shares, and, on a CPU, copied into every rank's arena."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ...memory.files.format import AdapterManifest
from ...memory.host.buffers import Buffers
from ...memory.host.image import HostImage, LayerStream
from ...memory.pages.adapter_layout import AdapterLayout
from ...memory.pages.arena import Arena
from ...memory.pages.layout import MODULES, ModuleDims
from ...memory.transfers.host_copies import HostCopies, HostTransfer
from ...memory.transfers.transfer import Transfer, check_pages
from ..model.config import ModelConfig
from ..model.shard import Shard
from .adapters import ModelAdapters


class RankAdapters:
    """Reads adapters once and cuts them into shares of the ranks. A share has the same layout on all ranks.

    Of a projection with shares of its outputs A is whole on every rank and B a share; with shares of its inputs A is a
    share and B whole. An image's data are the shares of all ranks.
    """

    def __init__(
        self, whole: ModelConfig, share: ModelConfig, arena: Arena, size: int, buffers: Buffers | None = None
    ) -> None:
        """whole, share: shapes of the model, and of a rank's share of it. arena: on the host, of a rank's layout.
        buffers: for shares, by default in ordinary memory.
        """
        self._dtype, self._page = arena.pages.dtype, arena.layout
        self._whole = ModelAdapters(whole, arena, self._dtype)
        self._share = ModelAdapters(share, arena, self._dtype)
        self._buffers = buffers or self._share.dma.buffers
        self._size = size
        self._parts = [
            {name: Shard(rank, size).of_module(name, whole) for name in MODULES} for rank in range(size)
        ]  # fmt: skip
        self._dims = whole.module_dims, share.module_dims

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        return self._whole.inspect(path, roots)

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        """The layout of a share."""
        return self._share.layout(manifest)

    def read(self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage) -> None:
        """Read the file once; a layer's shares are cut from it as soon as it is there."""
        whole_layout, whole = self._whole.layout(manifest), HostImage()
        shares = self._take(layout.num_pages)
        image.data = shares
        done = 0

        def cut() -> None:
            nonlocal done
            ready = whole.stream.num_ready
            for layer in range(done, ready):
                for share, parts in zip(shares, self._parts, strict=True):
                    _cut(manifest, layer, (whole_layout, whole.data), (layout, share), parts, self._dims)
            done = ready
            image.publish(ready)

        whole.follow(cut)
        self._whole.read(manifest, whole_layout, whole)

    def _take(self, num_pages: int) -> list[torch.Tensor]:
        """Host memory for pages of every rank."""
        return [self._buffers.take((num_pages, self._page.page_elems), self._dtype) for _ in range(self._size)]


class ArenaAdapters(RankAdapters):
    """Copies every rank's share into its arena, all of which this process sees."""

    def __init__(self, whole: ModelConfig, share: ModelConfig, arenas: Sequence[Arena], counts: np.ndarray) -> None:
        """counts: see `CpuSeat`."""
        super().__init__(whole, share, arenas[0], len(arenas))
        self._copies = [HostCopies(arena.pages) for arena in arenas]
        self._num_pages = arenas[0].num_pages
        self._counts = counts
        self._free_counts = list(range(len(counts)))
        self._used_counts: weakref.WeakKeyDictionary[Transfer, int] = weakref.WeakKeyDictionary()

    def place(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> Transfer | None:
        check_pages(pages, layout.num_pages, self._num_pages)
        if not self._free_counts:
            raise RuntimeError(f"{len(self._counts)} adapters are on their way into the arenas already")
        at = self._free_counts.pop()
        self._counts[at] = 0
        transfer = HostTransfer(self, image, layout, pages, LayerStream(self._counts[at : at + 1]))
        self._used_counts[transfer] = at
        weakref.finalize(transfer, self._free_counts.append, at).atexit = False
        return None if transfer.is_done() else transfer

    def save(self, layout: AdapterLayout, pages: list[int]) -> HostImage:
        image = HostImage()
        image.data = self._take(len(pages))
        for copies, share in zip(self._copies, image.data, strict=True):
            copies.copy_out(pages, share)
        image.publish(layout.num_layers)
        return image

    def copy_in(self, image: Sequence[torch.Tensor], ranges: Sequence[tuple[int, int]], pages: Sequence[int]) -> None:
        for copies, share in zip(self._copies, image, strict=True):
            copies.copy_in(share, ranges, pages)

    def count_of(self, transfer: Transfer) -> int:
        """Number of the count, in the ranks' memory, of the layers that have arrived."""
        return self._used_counts[transfer]


def _cut(
    manifest: AdapterManifest,
    layer: int,
    whole: tuple[AdapterLayout, torch.Tensor],
    share: tuple[AdapterLayout, torch.Tensor],
    parts: Mapping[str, tuple[slice, slice]],
    dims: tuple[ModuleDims, ModuleDims],
) -> None:
    """Copy a rank's part of a layer. whole, share: layout and elements; parts: inputs and outputs of each projection
    that the rank has; dims: of the whole projections and of the shares.
    """
    places = zip(manifest.parts, whole[0].parts, share[0].parts, strict=True)
    for part, from_place, to_place in places:
        if from_place.first_elem[layer] < 0:
            continue
        source, target = (
            data.view(-1)[place.first_elem[layer] :][: place.layer_elems].view(part.rank, -1)
            for place, (_, data) in ((from_place, whole), (to_place, share))
        )
        for name in part.targets:
            m = MODULES.index(name)
            (d_in, d_out), (to_in, to_out) = dims[0][name], dims[1][name]
            inputs, outputs = parts[name]
            a, b = from_place.slabs.a_offset[m], from_place.slabs.b_offset[m]
            to_a, to_b = to_place.slabs.a_offset[m], to_place.slabs.b_offset[m]
            target[:, to_a : to_a + to_in] = source[:, a : a + d_in][:, inputs]
            target[:, to_b : to_b + to_out] = source[:, b : b + d_out][:, outputs]
