"""Shadow weights: a copy of the projections that an adapter targets, with the adapter in it (dLoRA's merged mode).

The model's own weights are never written. Whether a step takes the shadow or them is a flag of its batch, so that
un-merging costs nothing and leaves no trace.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ...memory.adapters.adapter import Adapter
from ...memory.pages.arena import Arena
from ...ops.sgmv import AdapterRows
from ..requests.types import CannotMerge
from .batch import LoraState
from .weights import LayerWeights

#: Names of a layer's matrices, in the order of the groups of projections.
MATRICES = ("qkv", "o", "gate_up", "down")

#: Largest factor by which the norm of a row of weights may grow, by bytes per element; chosen. Rounding the sum makes
#: an error proportional to it, which rows of the base model and of other adapters see: in 16 bits it may be twice the
#: weights' own rounding error. Float32 rounds 2^16 times as finely, and a factor of 256 still changes no token.
MOST_GROWTH = {2: 2.0, 4: 256.0}


#: Bytes of a matrix that `_touch` makes the system allocate at a time: half a huge page, so that no piece but the first
#: reaches into two unallocated ones.
PIECE_BYTES = 1 << 20


class MergeableModel(Protocol):
    """A model with replaceable layer weights."""

    @property
    def layers(self) -> Sequence[LayerWeights]: ...

    def merge(
        self, layer: int, group: int, rows: Sequence[AdapterRows], origin: torch.Tensor, out: torch.Tensor, /
    ) -> float:
        """Write a matrix with an adapter's parts in it to out, in origin's layout; the sums are of float32.

        Returns by how much the norm of a row grows, at most; infinity where a sum is not finite.
        """
        ...

    def use_merged(self, layers: Sequence[LayerWeights] | None, /) -> None:
        """Set the layers that merged steps use; None: there are none."""
        ...


#: Places of a shadow's matrices: layer, group and run of pages of each.
Places = tuple[tuple[int, int, range], ...]


class CapturedSteps(Protocol):
    """Steps that are captured with the places of their weights in them."""

    @property
    def places(self) -> Sequence[Places]:
        """Places that steps have been captured with, the last used first."""
        ...

    def use(self, places: Places, /) -> None:
        """Set the places of steps in merged mode."""
        ...

    @property
    def num_left(self) -> int:
        """Number of steps yet to be captured with the places in use."""
        ...

    def capture_next(self) -> None:
        """Capture one of these steps."""
        ...


class ShadowWeights:
    """The shadow of one adapter at a time, in runs of pages of the arena; made matrix by matrix between steps.

    adapter: the adapter merged into it, None when there is no shadow.
    """

    def __init__(
        self, model: MergeableModel, arena: Arena, lora: LoraState, captured: CapturedSteps | None = None
    ) -> None:
        """captured: steps to capture once the weights are made; None if steps are not captured."""
        self._model = model
        self._arena = arena
        self._lora = lora
        self._captured = captured
        self.adapter: Adapter | None = None
        self._left: list[tuple[int, int, torch.Tensor]] = []  # layer, group and place of what is to be made
        self._num_elems = 0  # of all matrices
        self._num_touched = 0  # elements of the next matrix's place, which the system has given memory for
        self._pace = 0.0  # seconds that an element of the last matrix took; 0: there has been none
        self._layers: list[LayerWeights] = []

    def sizes(self, adapter: Adapter) -> list[int]:
        """Pages of each run that an adapter's shadow takes, one for each matrix in which it changes something."""
        page = self._arena.layout.page_bytes
        origins = [self._origin(*at) for at in self._targets(adapter)]
        return [-(-origin.numel() * origin.itemsize // page) for origin in origins]

    def wished_runs(self, adapter: Adapter) -> list[range] | None:
        """Return the runs in which another adapter of the same matrices was, if steps are captured with them."""
        if self._captured is None:
            return None
        targets = self._targets(adapter)
        for places in self._captured.places:
            if [(layer, group) for layer, group, _ in places] == targets:
                return [run for _, _, run in places]
        return None

    def begin(self, adapter: Adapter, runs: Sequence[range]) -> None:
        """Give an adapter that is complete in the arena the runs of `sizes`, for `advance` to fill."""
        self.drop()
        self.adapter = adapter
        elems, page = self._arena.pages.view(-1), self._arena.layout.page_elems
        self._layers = list(self._model.layers)
        targets = self._targets(adapter)
        if self._captured is not None:
            self._captured.use(tuple((*at, run) for at, run in zip(targets, runs, strict=True)))
        for (layer, group), run in zip(targets, runs, strict=True):
            origin = self._origin(layer, group)
            place = elems[run.start * page :].view(origin.dtype)[: origin.numel()].view(origin.shape)
            self._left.append((layer, group, place))
            self._layers[layer] = replace(self._layers[layer], **{MATRICES[group]: place})
        self._left.reverse()
        self._num_elems = sum(place.numel() for _, _, place in self._left)

    def advance(self, max_seconds: float) -> bool:
        """Make the next matrix, and more while there is time for them; True when all are made and steps may use them.

        Where steps are captured with their weights' places, the captures come last, one per call. Raises CannotMerge
        when the adapter outweighs the weights; the caller must then drop the shadow.
        """
        if self.adapter is None:
            raise RuntimeError("there is no shadow to make")
        end = time.perf_counter() + max_seconds
        has_worked = False
        while self._left:
            layer, group, place = self._left[-1]
            if not self._is_touched(place):
                has_worked = True
                if not self._touch_until(place, end):
                    return False
            if has_worked and (not self._pace or time.perf_counter() + self._pace * place.numel() > end):
                return False
            has_worked = True
            self._left.pop()
            self._make(self.adapter, layer, group, place)
        self._model.use_merged(self._layers)
        captured = self._captured
        if captured is None or not captured.num_left:
            return True
        if not has_worked:
            captured.capture_next()
        return not captured.num_left

    def _make(self, adapter: Adapter, layer: int, group: int, place: torch.Tensor) -> None:
        parts = [part for part in self._lora.rows_of(adapter) if _changes(part, layer, self._lora.modules(group))]
        began = time.perf_counter()
        growth = self._model.merge(layer, group, parts, self._origin(layer, group), place)
        most = MOST_GROWTH[place.itemsize]
        if not growth <= most:
            raise CannotMerge(
                f"adapter {adapter.name!r} makes a row of layer {layer}'s {MATRICES[group]} weights "
                f"{growth:.3g} times as large, of {most:g} that rounding them bears; it is served unmerged"
            )
        self._pace, self._num_touched = (time.perf_counter() - began) / place.numel(), 0

    def _touch_until(self, place: torch.Tensor, end: float) -> bool:
        """Touch a place piece by piece while there is time for one more; True when all of it is."""
        began = time.perf_counter()
        for pieces in itertools.count(1):
            if self._touch(place):
                return True
            now = time.perf_counter()
            if now + (now - began) / pieces > end:
                return False
        raise AssertionError

    def _is_touched(self, place: torch.Tensor) -> bool:
        """True if a place has its memory: on a GPU, where it is small, or once `_touch` is through."""
        is_small = place.numel() * place.itemsize <= PIECE_BYTES
        return is_small or place.device.type != "cpu" or self._num_touched >= place.numel()

    def _touch(self, place: torch.Tensor) -> bool:
        """Have the system give memory for the next piece of a place; True when it was the last.

        It does so when a page is first written, which may take longer than all that is written to it then.
        """
        start, size = self._num_touched, place.itemsize
        place.view(-1)[start : start + PIECE_BYTES // size : mmap.PAGESIZE // size] = 0
        self._num_touched = min(start + PIECE_BYTES // size, place.numel())
        return self._num_touched == place.numel()

    @property
    def share_made(self) -> float:
        """Share of the matrices' elements that are made, 0 to 1."""
        left = sum([place.numel() for _, _, place in self._left])
        return 1 - left / self._num_elems if self._num_elems else 0.0

    def drop(self) -> None:
        """Drop the shadow; its pages may then have another owner."""
        self._model.use_merged(None)
        self.adapter = None
        self._left, self._layers = [], []
        self._num_elems = self._num_touched = 0

    def check(self, adapter: Adapter) -> None:
        """RuntimeError unless steps may use the shadow, and it is this adapter's."""
        if adapter is not self.adapter or self._left:
            raise RuntimeError(f"the shadow weights are not of {adapter!r}")

    def _targets(self, adapter: Adapter) -> list[tuple[int, int]]:
        """Layer and group of each matrix in which an adapter changes something."""
        parts = self._lora.rows_of(adapter)
        return [
            (layer, group)
            for layer in range(len(self._model.layers))
            for group in range(len(MATRICES))
            if any(_changes(part, layer, self._lora.modules(group)) for part in parts)
        ]

    def _origin(self, layer: int, group: int) -> torch.Tensor:
        return getattr(self._model.layers[layer], MATRICES[group])


def _changes(part: AdapterRows, layer: int, modules: Sequence[int]) -> bool:
    return part.first_elem[layer] >= 0 and any(part.a_offset[module] >= 0 for module in modules)
