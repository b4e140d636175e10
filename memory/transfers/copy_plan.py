"""The plan of a transfer's copies between a host image and pages of a GPU's arena.

Tests: tests/memory/transfers/test_dma_plan.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..pages.adapter_layout import AdapterLayout


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Elements that are contiguous both in the image, from `image_elem` on, and in the arena, from `arena_elem` on."""

    image_elem: int
    arena_elem: int
    num_elems: int


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Layers `first_layer … last_layer`, which are copied under one event."""

    first_layer: int
    last_layer: int
    runs: tuple[CopyRun, ...]

    @property
    def num_elems(self) -> int:
        return sum(run.num_elems for run in self.runs)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The groups of a transfer."""

    groups: tuple[CopyGroup, ...]
    """In the order in which they are copied."""
    group_of: tuple[int, ...]
    """The group of each layer; -1 for a layer without bytes."""

    @classmethod
    def of_layers(cls, layout: AdapterLayout, pages: Sequence[int], page_elems: int, group_elems: int = 0) -> CopyPlan:
        """Plan the copies of an adapter, layer by layer. pages: its pages in the arena, in the layout's order.

        The first group is the first layer alone, so that a prefill begins as early as possible. A later group ends with
        the layer that reaches `group_elems`.
        """
        ranges = (layout.layer_ranges(layer) for layer in range(layout.num_layers))
        return cls._build(ranges, pages, page_elems, group_elems)

    @classmethod
    def of_pages(cls, pages: Sequence[int], page_elems: int, group_elems: int = 0) -> CopyPlan:
        """Plan the copies of whole pages, each of which counts as a layer."""
        ranges = ([(i * page_elems, (i + 1) * page_elems)] for i in range(len(pages)))
        return cls._build(ranges, pages, page_elems, group_elems)

    @classmethod
    def _build(
        cls, layers: Iterable[list[tuple[int, int]]], pages: Sequence[int], page_elems: int, group_elems: int
    ) -> CopyPlan:
        groups: list[CopyGroup] = []
        group_of: list[int] = []
        ranges: list[tuple[int, int]] = []
        first = last = num_elems = 0
        for layer, found in enumerate(layers):
            if not found:
                group_of.append(-1)
                continue
            group_of.append(len(groups))
            first, last = (first if ranges else layer), layer
            ranges += found
            num_elems += sum(end - begin for begin, end in found)
            if not groups or num_elems >= group_elems:
                groups.append(CopyGroup(first, last, _runs(ranges, pages, page_elems)))
                ranges, num_elems = [], 0
        if ranges:
            groups.append(CopyGroup(first, last, _runs(ranges, pages, page_elems)))
        return cls(tuple(groups), tuple(group_of))


def _runs(ranges: list[tuple[int, int]], pages: Sequence[int], page_elems: int) -> tuple[CopyRun, ...]:
    """Split an image's ranges only where its pages are not contiguous in the arena."""
    runs: list[CopyRun] = []
    for begin, end in sorted(ranges):
        while begin < end:
            page, offset = divmod(begin, page_elems)
            count = min(end - begin, page_elems - offset)
            target = pages[page] * page_elems + offset
            last = runs[-1] if runs else None
            if last and (last.image_elem + last.num_elems, last.arena_elem + last.num_elems) == (begin, target):
                runs[-1] = CopyRun(last.image_elem, last.arena_elem, last.num_elems + count)
            else:
                runs.append(CopyRun(begin, target, count))
            begin += count
    return tuple(runs)
