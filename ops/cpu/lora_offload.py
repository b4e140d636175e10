"""CPU LoRA offload: LoRA terms of a step that offload workers compute (`native/offload.h`), from adapters' images.

The base model sends rows, layer by layer; each offload worker, a thread of the library, computes a share of them until
the step ends.

Tests: tests/core/executors/test_lora_offload.py
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..library.described_adapters import described
from ..library.native_descriptors import ELEMENT_OF, GemmShape, described_gemm_shapes
from ..library.native_library import native_layout, required
from ..lora.sgmv import AdapterRows, Segments
from ..ranks.ranks import SPINNING_SECONDS, Ranks


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


class OffloadWorkers:
    """The library's offload workers: threads that sleep between steps. One thread at a time may use them."""

    def __init__(
        self,
        gemm_shapes: Sequence[GemmShape],
        dtype: torch.dtype,
        most_rows: int,
        cpus: Sequence[int | None],
        *,
        is_woken: bool = True,
    ) -> None:
        """gemm_shapes, dtype: of the model's layers. most_rows: the most that a step sends. cpus: the processor of each
        worker; None: any. is_woken: False if rank 0 is a device, which wakes nobody: workers don't sleep in its steps.
        """
        self._library = found = required()
        size, floats = 1 + len(cpus), exchange_floats(gemm_shapes, most_rows)
        self.memory = mmap.mmap(-1, Ranks.num_bytes(size, floats))
        """Memory of the exchanged rows."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        """Its address."""
        self.ranks = Ranks(self.memory, 0, size, floats, math.inf, SPINNING_SECONDS if is_woken else math.inf)
        """Rank 0."""
        self._exchanges = mmap.mmap(-1, exchanges_bytes())
        self.exchanges = ctypes.addressof(ctypes.c_char.from_buffer(self._exchanges))
        """See `OffloadedSegments`."""
        self._gemm_shapes = described_gemm_shapes(gemm_shapes)
        numbers = (c_int32 * len(cpus))(*(-1 if cpu is None else cpu for cpu in cpus))
        self._handle = found.chorus_offload_create(ELEMENT_OF[dtype], self.ranks.handle, numbers)
        self._kept: Any = None

    def begin(self, rows: Sequence[AdapterRows], row: Sequence[int], share: Sequence[int], images: Any) -> None:
        """Begin a step, whose rows may follow.

        rows: of the offloaded segments, with `pages` of their images. row, share: see `OffloadedSegments`. images: each
        segment's, `[pages, page_elems]`.
        """
        count = len(rows)
        own = [described(each) for each in rows]
        tables = (
            (c_int32 * (count + 1))(*row),
            (c_int32 * len(share))(*share),
            (c_void_p * count)(*(ctypes.addressof(each) for each, _ in own)),
            (c_void_p * count)(*(image.data_ptr() for image in images)),
        )
        descriptor = native_layout().filled(
            "OffloadWorkersDesc",
            num_gemm_shapes=len(self._gemm_shapes),
            count=count,
            page_elems=images[0].shape[1],
            gemm_shapes=ctypes.addressof(self._gemm_shapes),
            exchanges=self.exchanges,
            **dict(zip(("row", "share", "adapters", "images"), map(ctypes.addressof, tables), strict=True)),
        )
        self._kept = descriptor, tables, own, images  # until the step ends, whatever becomes of the adapters
        self._library.chorus_offload_begin(self._handle, ctypes.addressof(descriptor))

    def end(self) -> None:
        """End the step: all workers have left it when this returns."""
        self._library.chorus_offload_end(self._handle)
        self._kept = None

    def close(self) -> None:
        """End the threads, and before it the step, if one is under way: it may have failed."""
        if getattr(self, "_handle", None):
            self.end()
            self._library.chorus_offload_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


def exchange_floats(gemm_shapes: Sequence[GemmShape], tokens: int) -> int:
    """Float32 values of memory that a rank needs for `tokens` rows of x or of LoRA terms. See `Ranks`."""
    return tokens * row_elems(torch.float32, max(map(max, gemm_widths(gemm_shapes))))


def gemm_widths(gemm_shapes: Sequence[GemmShape]) -> list[tuple[int, int]]:
    """Inputs and outputs of each."""
    return [(inputs, sum(width for _, _, width in modules)) for inputs, modules, _ in gemm_shapes]


def input_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows are sent, for a model in `dtype`."""
    is_wide = required().chorus_offload_input(ELEMENT_OF[dtype]) == torch.float32.itemsize
    return torch.float32 if is_wide else dtype


def row_elems(dtype: torch.dtype, width: int) -> int:
    """Elements from one sent row of `width` elements to the next."""
    return required().chorus_offload_row(ELEMENT_OF[dtype], width)


def post_exchange(ranks: Ranks, exchanges: int, x: torch.Tensor, dtype: torch.dtype) -> None:
    """Send rows of the first layer's input, as a step with one offloaded segment does, to measure the time.

    dtype: of the model. exchanges: see `OffloadedSegments`. After `ranks.meet` the LoRA terms are in the workers'
    parts.
    """
    required().chorus_offload_post(ranks.handle, exchanges, ELEMENT_OF[dtype], x.data_ptr(), len(x), x.shape[1])
