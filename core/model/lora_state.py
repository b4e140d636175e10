"""A step's adapters in the form that the LoRA operators take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from ...memory.adapters.adapter import Adapter
from ...memory.pages.adapter_layout import AdapterPart, PartLayout
from ...memory.pages.layout import MODULES
from ...memory.transfers.transfer import Transfer
from ...ops.sgmv import AdapterRows, Segments, sgmv
from ..requests.types import BASE_SLOT, ScheduledRow
from .config import ModelConfig

#: Adapter of a row: its slot, or several in the order in which they are added up, each with a factor of its
#: scale. ((3, 1.0), (0, -1.0)) is what slot 3 adds beyond slot 0.
RowAdapters = int | tuple[tuple[int, float], ...]

#: Groups of projections that share an input, in `lora_groups`' order.
QKV, ATTN_O, GATE_UP, DOWN = range(4)

#: The page list that rows were made for, and the rows of each part.
_Resident = tuple[list[int], list[AdapterRows]]


class StepLora(Protocol):
    """Adds LoRA products of x `[tokens, in]` to packed outputs y `[tokens, out]` in a forward pass."""

    def wait(self, layer: int, /) -> None:
        """Wait for `layer` of adapters that are still being loaded; called before the layer is computed."""

    def add(self, group: int, y: torch.Tensor, x: torch.Tensor, layer: int, /) -> None:
        """Add the adapters' products of a group of projections with a common input: QKV, ATTN_O, GATE_UP or DOWN."""


class LoraState:
    """Applies a step's adapters to the projections of a layer; the segments' adapters are set once per step."""

    def __init__(self, config: ModelConfig, arena: torch.Tensor, max_stall: float = 0.0) -> None:
        """max_stall: seconds that a step may wait in all for adapters that are still coming."""
        self.arena = arena
        self.max_stall = max_stall
        self.segments = Segments()
        self._coming: dict[int, Transfer] = {}  # by slot
        self._late: set[int] = set()
        self._slots: list[int] = []  # of each segment
        self._patience = 0.0  # seconds that the step may still wait
        self._step: tuple[object, ...] | None = None  # what `segments` were made of
        self._rows: WeakKeyDictionary[Adapter, _Resident] = WeakKeyDictionary()
        self._scaled: WeakKeyDictionary[AdapterRows, dict[float, AdapterRows]] = WeakKeyDictionary()
        self._groups = lora_groups(config)

    def set_step(
        self,
        adapters: Sequence[Adapter],
        slots: Sequence[RowAdapters],
        lengths: Sequence[int],
        merged: Adapter | None = None,
    ) -> None:
        """Describe a step: row i has `lengths[i]` tokens and uses `adapters[slots[i]]`, or the base model at -1.

        Neighbouring rows of the same slot, or of the same several, become one segment. merged: the adapter merged into
        the weights: it is subtracted from the rows of other adapters (neighbouring rows as one segment), and its own
        rows have no LoRA work.
        """
        transfers = [adapter.transfer for adapter in adapters]
        step = None
        if transfers.count(None) == len(transfers):
            self._coming = {}
            pages = [adapter.pages for adapter in adapters]
            step = list(adapters), pages, list(slots), list(lengths), merged and (merged, merged.pages)
            if step == self._step:
                return  # most decode steps have the same segments as the step before
        else:
            self._coming = {slot: transfer for slot, transfer in enumerate(transfers) if transfer is not None}
        self._step = step
        rows = [self.rows_of(adapter) for adapter in adapters]
        minus = [] if merged is None else [self._times(part, -1.0) for part in self.rows_of(merged)]
        own = next((slot for slot, adapter in enumerate(adapters) if adapter is merged), None)
        self._late.clear()
        self._patience = self.max_stall
        self._slots = []
        segments = Segments()
        begin = 0
        apart = zip((slot == own for slot in slots), lengths, strict=True)
        for is_own, group in itertools.groupby(apart if minus else (), itemgetter(0)):
            end = begin + sum(length for _, length in group)
            for part in () if is_own else minus:
                segments.add(begin, end, part)
                self._slots.append(BASE_SLOT)
            begin = end
        begin = 0
        for used, group in itertools.groupby(zip(slots, lengths, strict=True), itemgetter(0)):
            end = begin + sum(length for _, length in group)
            for slot, factor in ((used, 1.0),) if isinstance(used, int) else used:
                if slot in (BASE_SLOT, own):
                    continue
                transfer = self._coming.get(slot)
                for part in rows[slot]:
                    scaled = part if factor == 1.0 else self._times(part, factor)
                    segments.add(begin, end, scaled, 0 if transfer is None else transfer.address)
                    self._slots.append(slot)
            begin = end
        self.segments = segments

    def wait(self, layer: int) -> None:
        """Wait for `layer` of adapters that are still being loaded; adapters that miss the deadline are late."""
        for slot, transfer in self._coming.items():
            if slot not in self._late:
                began = time.monotonic()
                if not transfer.wait_layer(layer, max(0.0, self._patience)):
                    self._late.add(slot)
                    late = {index for index, of in enumerate(self._slots) if of == slot}
                    self.segments = self.segments.without(late)  # what lies in its pages may be NaN for all
                    self._slots = [of for of in self._slots if of != slot]
                self._patience -= time.monotonic() - began

    def late_slots(self) -> set[int]:
        """Slots of adapters that missed the deadline: their rows are void."""
        return self._late.union(self._slots[index] for index in self.segments.late)

    def late_requests(self, rows: Sequence[ScheduledRow]) -> list[str]:
        """Return the requests with void rows: their adapter missed the deadline."""
        if not (self._late or self.segments.late):
            return []
        late = self.late_slots()
        return [row.request_id for row in rows if row.slot in late]

    def add(self, group: int, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        sgmv(y, x, self.arena, self.segments, layer, self._groups[group])

    def modules(self, group: int) -> list[int]:
        """The modules of a group of projections."""
        return [module for module, _, _ in self._groups[group]]

    def _times(self, rows: AdapterRows, factor: float) -> AdapterRows:
        """Return the same rows with another scale, cached."""
        made = self._scaled.setdefault(rows, {})
        if factor not in made:
            made[factor] = replace(rows, scale=factor * rows.scale)
        return made[factor]

    def rows_of(self, adapter: Adapter) -> list[AdapterRows]:
        """Return the rows of the adapter's parts in its current pages, cached per page list."""
        found = self._rows.get(adapter)
        if found is None or found[0] is not adapter.pages:
            parts = zip(adapter.manifest.parts, adapter.layout.parts, strict=True)
            rows = [_rows(part, place, adapter.pages) for part, place in parts]
            found = self._rows[adapter] = adapter.pages, rows
        return found[1]


def _rows(part: AdapterPart, place: PartLayout, pages: list[int]) -> AdapterRows:
    slabs = place.slabs
    return AdapterRows(
        pages=pages,
        rank=part.rank,
        scale=part.scale,
        slab_elems=slabs.slab_elems,
        a_offset=slabs.a_offset,
        b_offset=slabs.b_offset,
        first_elem=place.first_elem,
    )


def lora_groups(config: ModelConfig) -> list[list[tuple[int, int, int]]]:
    """The projections of QKV, ATTN_O, GATE_UP and DOWN; see `_group`."""
    widths = {name: out for name, (_, out) in config.module_dims.items()}
    names = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    return [_group(group, widths) for group in names]


def _group(names: Sequence[str], widths: dict[str, int]) -> list[tuple[int, int, int]]:
    """(module id, first column, width) of projections with outputs packed side by side."""
    group, column = [], 0
    for name in names:
        group.append((MODULES.index(name), column, widths[name]))
        column += widths[name]
    return group
