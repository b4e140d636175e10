"""A step's adapters as the operators want them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from ..memory.adapter_store import Adapter
from ..memory.layout import MODULES
from ..ops.sgmv import AdapterRows, Segments, sgmv
from .model_config import ModelConfig
from .types import BASE_SLOT


class LoraState:
    """Applies a step's adapters to the projections of a layer; which segment has which adapter is set once a step."""

    def __init__(self, config: ModelConfig, arena: torch.Tensor) -> None:
        self._arena = arena
        self.segments = Segments([0], [])
        self._rows: WeakKeyDictionary[Adapter, AdapterRows] = WeakKeyDictionary()
        widths = {name: out for name, (_, out) in config.module_dims.items()}
        self._qkv = _group(("q_proj", "k_proj", "v_proj"), widths)
        self._o = _group(("o_proj",), widths)
        self._gate_up = _group(("gate_proj", "up_proj"), widths)
        self._down = _group(("down_proj",), widths)

    def set_step(self, adapters: Sequence[Adapter], slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Describe a step: row i has `lengths[i]` tokens and uses `adapters[slots[i]]`, or the base model at -1.

        Neighbouring rows of one slot become one segment.
        """
        rows = [self._rows_of(adapter) for adapter in adapters]
        indptr, used, previous = [0], [], None
        for slot, length in zip(slots, lengths, strict=True):
            if slot == previous:
                indptr[-1] += length
                continue
            indptr.append(indptr[-1] + length)
            used.append(None if slot == BASE_SLOT else rows[slot])
            previous = slot
        self.segments = Segments(indptr, used)

    def qkv(self, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        sgmv(y, x, self._arena, self.segments, layer, self._qkv)

    def o(self, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        sgmv(y, x, self._arena, self.segments, layer, self._o)

    def gate_up(self, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        sgmv(y, x, self._arena, self.segments, layer, self._gate_up)

    def down(self, y: torch.Tensor, x: torch.Tensor, layer: int) -> None:
        sgmv(y, x, self._arena, self.segments, layer, self._down)

    def _rows_of(self, adapter: Adapter) -> AdapterRows:
        """Where the adapter's rows lie now; a reload into other pages has a new page list."""
        rows = self._rows.get(adapter)
        if rows is None or rows.pages is not adapter.pages:
            slabs = adapter.slabs
            rows = self._rows[adapter] = AdapterRows(
                pages=adapter.pages,
                rank=adapter.rank,
                scale=adapter.manifest.scale,
                slab_elems=slabs.slab_elems,
                slabs_per_page=slabs.slabs_per_page,
                a_offset=slabs.a_offset,
                b_offset=slabs.b_offset,
            )
        return rows


def _group(names: Sequence[str], widths: dict[str, int]) -> list[tuple[int, int, int]]:
    """(module id, first column, width) of projections whose outputs are packed side by side."""
    group, column = [], 0
    for name in names:
        group.append((MODULES.index(name), column, widths[name]))
        column += widths[name]
    return group
