"""CPU LoRA offload: LoRA terms of a step that offload workers compute (`native/offload.h`), from adapters' images.

The base model's process sends rows through shared memory, layer by layer; each offload worker computes a share of them
until the step ends.

Tests: tests/core/executors/test_lora_offload.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..library.described_adapters import described
from ..library.native_descriptors import ELEMENT_OF, GemmShape, described_gemm_shapes
from ..library.native_layout import layout_of
from ..library.native_library import library, native_layout, required
from ..lora.sgmv import AdapterRows, Segments
from ..ranks.ranks import Ranks


def exchanges_bytes() -> int:
    """Bytes of the descriptions of a step's exchanges."""
    layout = native_layout()
    return layout.number("kMaxExchanges") * layout.record("Exchange").itemsize


def most_offloaded() -> int:
    """The most segments of a step that can be offloaded at once."""
    return native_layout().length("Exchange.active")


def exchanges_at(address: int) -> np.ndarray:
    """The descriptions of a step's exchanges, in memory of `exchanges_bytes`."""
    memory = (ctypes.c_uint8 * exchanges_bytes()).from_address(address)
    return np.ctypeslib.as_array(memory).view(native_layout().record("Exchange"))


@dataclass(slots=True)
class OffloadedSegments:
    """The offloaded segments of a step."""

    ranks: Ranks
    entries: Sequence[int]
    """Indices of the segments."""
    row: Sequence[int]
    """The first row of each segment among the offloaded rows, and the end of the last one."""
    share: Sequence[int]
    """The same for each offload worker's rows."""
    image_ready: Sequence[int]
    """For each entry the address of an int32, the number of layers in host memory."""
    exchanges: int
    """Address of `exchanges_bytes`."""
    layers: Sequence[int] = ()
    """Set by the step: the number of layers offloaded for each entry."""


class Offloading(Protocol):
    """Chooses the segments of a step to offload, and starts the offload workers on them."""

    def begin(self, segments: Segments, /) -> OffloadedSegments | None:
        """Called before a step whose segments have adapters in transit; returns None if nothing is offloaded."""
        ...


class OffloadTables:
    """A step's offloaded segments in the library's form. adapters: descriptors of the step's segments."""

    def __init__(self, offloaded: OffloadedSegments, rows: Sequence[AdapterRows], adapters: Any) -> None:
        """Give each offloaded segment its own descriptor, in which the step marks the offloaded layers."""
        count = len(offloaded.entries)
        own = [described(rows[entry]) for entry in offloaded.entries]
        for entry, (descriptor, _) in zip(offloaded.entries, own, strict=True):
            adapters[entry] = ctypes.addressof(descriptor)
        self._offloaded, self._layers = offloaded, (c_int32 * count)()
        tables = (
            (c_int32 * count)(*offloaded.entries),
            (c_int32 * (count + 1))(*offloaded.row),
            (c_int32 * len(offloaded.share))(*offloaded.share),
            (c_void_p * count)(*(tensors[1].data_ptr() for _, tensors in own)),
            (c_void_p * count)(*offloaded.image_ready),
            self._layers,
        )
        self._kept = own, tables  # the descriptor points to these
        segment, row, share, first_elem, image_ready, layers = map(ctypes.addressof, tables)
        self._descriptor = native_layout().filled(
            "OffloadDesc",
            ranks=offloaded.ranks.handle,
            count=count,
            segment=segment,
            row=row,
            share=share,
            first_elem=first_elem,
            image_ready=image_ready,
            layers=layers,
            exchanges=offloaded.exchanges,
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._descriptor)

    def note_offloaded(self) -> None:
        """Record the number of offloaded layers, after the step."""
        self._offloaded.layers = list(self._layers)


class OffloadWorker:
    """Computes a share of the offloaded rows of each step, in its own process. gemm_shapes: of the model's layers."""

    def __init__(self, gemm_shapes: Sequence[GemmShape], dtype: torch.dtype) -> None:
        self._library = found = required()
        self._layout, self._gemm_shapes = layout_of(found), described_gemm_shapes(gemm_shapes)
        self._handle = found.chorus_offload_create(ELEMENT_OF[dtype])

    def serve(
        self,
        ranks: Ranks,
        rows: Sequence[AdapterRows],
        row: Sequence[int],
        share: tuple[int, int],
        images: Sequence[int],
        page_elems: int,
        exchanges: int,
    ) -> None:
        """Compute until rank 0 ends the step.

        row, exchanges: see `OffloadedSegments`. share: its first row and the end of its rows. images: address of each
        adapter's image, into which `pages` are indices.
        """
        count = len(rows)
        own = [described(each) for each in rows]
        tables = (
            (c_int32 * (count + 1))(*row),
            (c_void_p * count)(*(ctypes.addressof(each) for each, _ in own)),
            (c_void_p * count)(*images),
        )
        descriptor = self._layout.filled(
            "OffloadWorkerDesc",
            num_gemm_shapes=len(self._gemm_shapes),
            first=share[0],
            last=share[1],
            count=count,
            page_elems=page_elems,
            gemm_shapes=ctypes.addressof(self._gemm_shapes),
            row=ctypes.addressof(tables[0]),
            adapters=ctypes.addressof(tables[1]),
            images=ctypes.addressof(tables[2]),
            exchanges=exchanges,
        )
        self._library.chorus_offload_serve(self._handle, ranks.handle, ctypes.addressof(descriptor))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.chorus_offload_destroy(self._handle)
            self._handle = None


def exchange_floats(gemm_shapes: Sequence[GemmShape], tokens: int) -> int:
    """Float32 values of memory that a process needs for `tokens` rows of x or of LoRA terms. See `Ranks`."""
    found = library()
    if found is None:
        return 0
    return tokens * row_elems(torch.float32, max(map(max, gemm_widths(gemm_shapes))))


def gemm_widths(gemm_shapes: Sequence[GemmShape]) -> list[tuple[int, int]]:
    """Inputs and outputs of each."""
    return [(inputs, sum(width for _, _, width in modules)) for inputs, modules, _ in gemm_shapes]


def input_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows are sent, for a model in `dtype`."""
    found = library()
    is_wide = found is None or found.chorus_offload_input(ELEMENT_OF[dtype]) == torch.float32.itemsize
    return torch.float32 if is_wide else dtype


def row_elems(dtype: torch.dtype, width: int) -> int:
    """Elements from one sent row of `width` elements to the next."""
    found = library()
    return width if found is None else found.chorus_offload_row(ELEMENT_OF[dtype], width)


def post_exchange(ranks: Ranks, exchanges: int, x: torch.Tensor, dtype: torch.dtype) -> None:
    """Send rows of the first layer's input, as a step with one offloaded segment does, to measure the time.

    dtype: of the model. exchanges: see `OffloadedSegments`. After `ranks.meet` the LoRA terms are in the workers'
    parts.
    """
    required().chorus_offload_post(ranks.handle, exchanges, ELEMENT_OF[dtype], x.data_ptr(), len(x), x.shape[1])
