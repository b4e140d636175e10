"""Which bytes of an adapter's weights file become which rows of its image, and in which order they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .adapter_layout import AdapterLayout, AdapterPart
from .file_spans import merged
from .layout import MODULES
from .tensor_file import ITEM_BYTES
from .tensor_places import TensorPlaces

if TYPE_CHECKING:
    from .file_spans import SpanAddresses

# How much is read at once, in whole layers; those of one read wait for each other.
_FIRST_READ_BYTES = 1 << 20
_LAST_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Layers whose bytes are read together. jobs: their rows of the table; spans: where in the file."""

    layers: range
    jobs: slice
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class RowJobs:
    """A row per module of a layer, the layers in order.

    table: `[jobs, 11]` int64: where A `[rank, d_in]` and B `[d_out, rank]` begin in the file, the element types of both
    (numbers in `ITEM_BYTES`' order), rank, d_in, d_out, the element of the image where the layer's slabs begin,
    slab_elems, and where in a slab the rows of A and of Bᵀ begin.
    """

    table: np.ndarray
    groups: tuple[ReadGroup, ...]

    def in_memory(self, group: ReadGroup, addresses: SpanAddresses) -> np.ndarray:
        """A group's part of the table, with addresses instead of places in the file."""
        found = self.table[group.jobs].copy()
        found[:, :2] = addresses.of(found[:, :2])
        return found


@lru_cache(64)
def row_jobs(
    parts: tuple[AdapterPart, ...],
    places: TensorPlaces,
    layout: AdapterLayout,
    dims: tuple[tuple[str, tuple[int, int]], ...],
) -> RowJobs:
    """The jobs of an adapter; those of equal shape, saved alike, share them. dims: items of `ModuleDims`."""
    sizes = dict(dims)
    by_layer: list[list[tuple[int, ...]]] = [[] for _ in range(layout.num_layers)]
    starts = iter(places)
    for part, place in zip(parts, layout.parts, strict=True):
        slabs = place.slabs
        for layer in part.layers:
            for name in part.targets:
                (a_start, a_type), (b_start, b_type) = next(starts), next(starts)
                m = MODULES.index(name)
                by_layer[layer].append((
                    a_start, b_start, a_type, b_type, part.rank, *sizes[name], place.first_elem[layer],
                    slabs.slab_elems, slabs.a_offset[m], slabs.b_offset[m],
                ))  # fmt: skip
    spans = [[span for job in jobs for span in _spans(job)] for jobs in by_layer]
    groups: list[ReadGroup] = []
    for layers in _groups([sum(end - start for start, end in found) for found in spans]):
        wanted = [span for layer in layers for span in spans[layer]]
        if layers.start == 0:
            wanted.append((0, places.header_bytes))
        begin = groups[-1].jobs.stop if groups else 0
        jobs = slice(begin, begin + sum(len(by_layer[layer]) for layer in layers))
        groups.append(ReadGroup(layers, jobs, tuple(merged(wanted))))
    table = np.array([job for jobs in by_layer for job in jobs], dtype=np.int64).reshape(-1, 11)
    return RowJobs(table, tuple(groups))


def _spans(job: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    a_start, b_start, a_type, b_type, rank, d_in, d_out, *_ = job
    item_bytes = tuple(ITEM_BYTES.values())
    a_bytes, b_bytes = rank * d_in * item_bytes[a_type], rank * d_out * item_bytes[b_type]
    return (a_start, a_start + a_bytes), (b_start, b_start + b_bytes)


def _groups(num_bytes: list[int]) -> Iterator[range]:
    """Layers to read at once: few at first, so that they come soon, then ever more, so that the disk is kept busy."""
    first, most = 0, _FIRST_READ_BYTES
    while first < len(num_bytes):
        last, total = first + 1, num_bytes[first]
        while last < len(num_bytes) and total + num_bytes[last] <= most:
            total += num_bytes[last]
            last += 1
        yield range(first, last)
        first, most = last, min(2 * most, _LAST_READ_BYTES)
