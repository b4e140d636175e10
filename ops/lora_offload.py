"""LoRA products of a step that other processes of the machine compute (`native/offload.h`), from adapters' images.

The process of the base model hands rows over in memory that all share, layer by layer; an offload worker computes a
share of them until the step ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .native_descriptors import (
    ELEMENT_OF,
    EXCHANGE,
    MAX_EXCHANGES,
    MODULES,
    AdapterDescriptor,
    OffloadDescriptor,
    OffloadWorkerDescriptor,
)
from .native_library import library
from .ranks import Ranks
from .sgmv import AdapterRows, Segments

#: Bytes of what says of a step's exchanges what is to be computed.
EXCHANGES_BYTES = MAX_EXCHANGES * EXCHANGE.itemsize


@dataclass(slots=True)
class OffloadedSegments:
    """What of a step is lent.

    entries: indices of its segments. row: where the rows of each begin in what is handed over, and where the last's
    end. share: the same of each offload worker's rows. image_ready: address of an int32 for each entry, the number of
    layers that are in host memory. layers: set by the step: how many layers of each were lent.
    exchanges: address of `EXCHANGES_BYTES`.
    """

    ranks: Ranks
    entries: Sequence[int]
    row: Sequence[int]
    share: Sequence[int]
    image_ready: Sequence[int]
    exchanges: int
    layers: Sequence[int] = ()


class Offloading(Protocol):
    """Chooses what of a step is lent, and has the offload workers begin with it."""

    def begin(self, segments: Segments, /) -> OffloadedSegments | None:
        """Called before a step with segments that have adapters on their way; None where nothing is lent."""
        ...


def described(rows: AdapterRows) -> tuple[AdapterDescriptor, tuple[torch.Tensor, torch.Tensor]]:
    """A part of an adapter as the library takes it, and what that points to."""
    pages = torch.tensor(rows.pages, dtype=torch.int64)
    first_elem = torch.tensor(rows.first_elem, dtype=torch.int64)
    descriptor = AdapterDescriptor(
        pages=pages.data_ptr(),
        first_elem=first_elem.data_ptr(),
        rank=rows.rank,
        scale=rows.scale,
        slab_elems=rows.slab_elems,
        a_offset=(c_int32 * MODULES)(*rows.a_offset),
        b_offset=(c_int32 * MODULES)(*rows.b_offset),
    )
    return descriptor, (pages, first_elem)


class OffloadTables:
    """A step's lent segments as the library takes them. adapters: descriptors of the step's segments."""

    def __init__(self, offloaded: OffloadedSegments, rows: Sequence[AdapterRows], adapters: Any) -> None:
        """Gives each lent segment a descriptor of its own, in which the step marks the layers that it lends."""
        count = len(offloaded.entries)
        own = [described(rows[entry]) for entry in offloaded.entries]
        for entry, (descriptor, _) in zip(offloaded.entries, own, strict=True):
            adapters[entry] = ctypes.addressof(descriptor)
        self._offloaded, self._layers = offloaded, (c_int32 * count)()
        tables = (
            (c_int32 * count)(*offloaded.entries),
            (c_int32 * (count + 1))(*offloaded.row),
            (c_int32 * len(offloaded.share))(*offloaded.share),
            (c_void_p * count)(*(own[1].data_ptr() for _, own in own)),
            (c_void_p * count)(*offloaded.image_ready),
            self._layers,
        )
        self._kept = own, tables  # what the descriptor points to
        self._descriptor = OffloadDescriptor(
            offloaded.ranks.handle, count, *map(ctypes.addressof, tables), offloaded.exchanges
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._descriptor)

    def note_offloaded(self) -> None:
        """Note how many layers were lent, after the step."""
        self._offloaded.layers = list(self._layers)


class OffloadWorker:
    """Computes a share of what a step lends, in a process of its own.

    shapes: hidden size, MLP size, widths of q and of k.
    """

    def __init__(self, shapes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        found = library()
        if found is None:
            raise RuntimeError("the native library is not built; reinstall chorus with a C++ compiler")
        self._library, self._shapes = found, shapes
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
        """Compute until rank 0 gives the step up. row: see `OffloadedSegments`; share: the first row, and the one
        behind the last; images: address of each adapter's image, into which its `pages` are indices. exchanges: see
        `OffloadedSegments`.
        """
        count = len(rows)
        own = [described(each) for each in rows]
        tables = (
            (c_int32 * (count + 1))(*row),
            (c_void_p * count)(*(ctypes.addressof(each) for each, _ in own)),
            (c_void_p * count)(*images),
        )
        descriptor = OffloadWorkerDescriptor(
            *self._shapes, *share, count, page_elems, *map(ctypes.addressof, tables), exchanges
        )
        self._library.chorus_offload_serve(self._handle, ranks.handle, ctypes.addressof(descriptor))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.chorus_offload_destroy(self._handle)
            self._handle = None


def exchange_floats(shapes: tuple[int, int, int, int], tokens: int) -> int:
    """Float32 values of memory that a process needs for `tokens` rows, of x or of the products. See `Ranks`."""
    found = library()
    if found is None:
        return 0
    return tokens * row_elems(torch.float32, max(map(max, group_widths(shapes))))


def group_widths(shapes: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    """Inputs and outputs of the groups of projections, as `Groups` of the library has them. shapes: see
    `OffloadWorker`.
    """
    hidden, ffn, q, kv = shapes
    return [(hidden, q + 2 * kv), (q, hidden), (hidden, 2 * ffn), (ffn, hidden)]


def input_dtype(dtype: torch.dtype) -> torch.dtype:
    """What rows are handed over in, of a model in `dtype`."""
    found = library()
    is_wide = found is None or found.chorus_offload_input(ELEMENT_OF[dtype]) == torch.float32.itemsize
    return torch.float32 if is_wide else dtype


def row_elems(dtype: torch.dtype, width: int) -> int:
    """Elements from row to row of `width` of them in what is handed over."""
    found = library()
    return width if found is None else found.chorus_offload_row(ELEMENT_OF[dtype], width)


def post_exchange(ranks: Ranks, exchanges: int, x: torch.Tensor, dtype: torch.dtype) -> None:
    """Hand rows of the first layer's input over, as a step with one lent segment does, to measure what that takes.

    dtype: of the model. exchanges: see `OffloadedSegments`. The products are in the offload workers' parts after
    `ranks.meet`.
    """
    found = library()
    if found is None:
        raise RuntimeError("the native library is not built; reinstall chorus with a C++ compiler")
    found.chorus_offload_post(ranks.handle, exchanges, ELEMENT_OF[dtype], x.data_ptr(), len(x), x.shape[1])
