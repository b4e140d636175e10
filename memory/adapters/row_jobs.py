"""Jobs that turn bytes of an adapter's weights file into rows of its image, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..files.tensor_file import ITEM_BYTES
from ..files.tensor_places import TensorPlaces
from ..pages.adapter_layout import AdapterLayout, AdapterPart
from ..pages.layout import MODULES

if TYPE_CHECKING:
    import torch

# How much is read at once, in whole layers; those of one read wait for each other.
_FIRST_READ_BYTES = 256 << 10
_LAST_READ_BYTES = 8 << 20


_MERGE_BYTES = 64 << 10  # what lies between two spans is read along when it is this little


@dataclass(frozen=True, slots=True, eq=False)
class RowJobs:
    """A row per module of a layer, the layers in order; some layers at once are read together, as a group.

    table: `[jobs, 11]` int64: where A `[rank, d_in]` and B `[d_out, rank]` begin in the file, the element types of both
    (numbers in `ITEM_BYTES`' order), rank, d_in, d_out, the element of the image where the layer's slabs begin,
    slab_elems, and where in a slab the rows of A and of Bᵀ begin. layers: of each group. groups: `[groups, 4]` int64:
    where its spans begin and end, then its jobs. spans: `[spans, 2]` int64: from which byte of the file to which. The
    first group has the file's header too.
    """

    table: np.ndarray
    layers: tuple[range, ...]
    groups: np.ndarray
    spans: np.ndarray


class RowsInFile(Protocol):
    """Reads an open file's groups one after another; the first is on its way from the beginning."""

    def next(self, out: torch.Tensor) -> object | None:
        """Lay out the next group's rows in `out`, flat. None when done; else what is wrong, and the group is passed."""
        ...

    def bytes(self, start: int, end: int) -> bytes:
        """Bytes of the file, of the group that was read last. LookupError when that was not read."""
        ...

    def close(self) -> None: ...


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
    layers = tuple(_groups([sum(end - start for start, end in found) for found in spans]))
    groups: list[tuple[int, int, int, int]] = []
    merged: list[tuple[int, int]] = []
    num_jobs = 0
    for index, group in enumerate(layers):
        first_span, first_job = len(merged), num_jobs
        wanted = [span for layer in group for span in spans[layer]]
        merged += _merged([*wanted, (0, places.header_bytes)] if index == 0 else wanted)
        num_jobs += sum(len(by_layer[layer]) for layer in group)
        groups.append((first_span, len(merged), first_job, num_jobs))
    return RowJobs(
        np.array([job for jobs in by_layer for job in jobs], dtype=np.int64).reshape(-1, 11),
        layers,
        np.array(groups, dtype=np.int64).reshape(-1, 4),
        np.array(merged, dtype=np.int64).reshape(-1, 2),
    )


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


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order, those that lie close to each other as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + _MERGE_BYTES:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
