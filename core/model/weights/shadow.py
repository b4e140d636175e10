"""Merged weights (a shadow): a copy of the projections that an adapter targets, with the adapter added (dLoRA §4).

The model's own weights are never written. A flag of each batch selects the copy or the originals, so un-merging costs
nothing and leaves no trace.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ....memory.adapters.adapter import Adapter
from ....memory.pages.arena import Arena
from ....ops.lora.sgmv import AdapterRows
from ....ops.lora.vectors import vectors_of
from ...requests.types import CannotMerge
from ..lora.lora_state import LoraState
from .layer_weights import LayerWeights

#: The largest factor by which the norm of a row of weights may grow, by bytes per element. Rounding the sum causes an
#: error proportional to it, which affects sequences of the base model and of other adapters. In 16 bits the error may
#: be twice the weights' own rounding error. Float32 is 2^16 times as precise, and a factor of 256 still changes no
#: token.
MOST_GROWTH = {2: 2.0, 4: 256.0}


#: Bytes of a matrix that `_touch` makes the system allocate at a time: half a huge page, so that only the first piece
#: may reach into two unallocated ones.
PIECE_BYTES = 1 << 20


INPUTS_ARE_ROUNDED = (
    "the model's activations are rounded to 8 bits for its quantised weights, and merged ones would be multiplied with "
    "others; adapters are served unmerged"
)


class MergeableModel(Protocol):
    """A model with replaceable layer weights."""

    @property
    def layers(self) -> Sequence[LayerWeights]: ...

    @property
    def bias_dtype(self) -> torch.dtype: ...

    def merged_form(self, layer: int, product: str, /) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of a merged matrix, which is not quantised. Raises CannotMerge."""
        ...

    def merge(self, layer: int, product: str, rows: Sequence[AdapterRows], origin: Any, out: torch.Tensor, /) -> float:
        """Write a matrix with an adapter's parts added to out, of `merged_form`; the sums are float32.

        Returns the largest factor by which the norm of a row grows; infinity if a sum is not finite.
        """
        ...

    def use_merged(self, layers: Sequence[LayerWeights] | None, /) -> None:
        """Set the layers that merged steps use; None if there are none."""
        ...


#: Addresses of merged matrices: layer, product and run of pages of each.
Addresses = tuple[tuple[int, str, range], ...]


def addresses_of(targets: Sequence[tuple[int, str]], runs: Sequence[range]) -> Addresses:
    """targets: layer and product of each matrix. runs: of these."""
    return tuple((*at, run) for at, run in zip(targets, runs, strict=True))


class CapturedSteps(Protocol):
    """Captured steps, which contain the addresses of their weights."""

    @property
    def addresses(self) -> Sequence[Addresses]:
        """Sets of addresses with captured steps, most recently used first."""
        ...

    def use(self, addresses: Addresses, /) -> None:
        """Set the addresses for steps in merged mode."""
        ...

    @property
    def num_left(self) -> int:
        """Number of steps still to be captured for the addresses in use."""
        ...

    def capture_next(self) -> None:
        """Capture one of these steps."""
        ...


class ShadowWeights:
    """The merged weights of one adapter, in runs of pages of the arena; made matrix by matrix between steps."""

    def __init__(
        self, model: MergeableModel, arena: Arena, lora: LoraState, captured: CapturedSteps | None = None
    ) -> None:
        """captured: steps to capture once the weights are made; None if steps are not captured."""
        self._model = model
        self._arena = arena
        self._lora = lora
        self._captured = captured
        self.adapter: Adapter | None = None
        """The merged adapter; None if there is none."""
        self._left: list[tuple[int, str, torch.Tensor]] = []  # layer, product and matrix of those still to be made
        self._num_elems = 0  # of all matrices
        self._num_touched = 0  # elements of the next matrix that already have memory from the system
        self._pace = 0.0  # seconds per element of the last matrix; 0: none so far
        self._layers: list[LayerWeights] = []

    def sizes(self, adapter: Adapter) -> list[int]:
        """Pages of each run that an adapter's merged weights take, one run for each matrix that it changes."""
        return self._sizes(self._targets(adapter))

    def _sizes(self, targets: Sequence[tuple[int, str]]) -> list[int]:
        page = self._arena.layout.page_bytes
        forms = [self._model.merged_form(*at) for at in targets]
        return [-(-shape.numel() * dtype.itemsize // page) for shape, dtype in forms]

    def wished_runs(self, adapter: Adapter) -> list[range] | None:
        """Return the runs in which another adapter of the same matrices was, if steps are captured for them."""
        if self._captured is None:
            return None
        targets = self._targets(adapter)
        for addresses in self._captured.addresses:
            if [(layer, product) for layer, product, _ in addresses] == targets:
                return [run for _, _, run in addresses]
        return None

    def begin(self, adapter: Adapter, runs: Sequence[range]) -> None:
        """Give an adapter that is complete in the arena the runs of `sizes`, for `advance` to fill."""
        self.drop()
        self.adapter = adapter
        self._layers = list(self._model.layers)
        targets = self._targets(adapter)
        if self._captured is not None:
            self._captured.use(addresses_of(targets, runs))
        for (layer, product), run in zip(targets, runs, strict=True):
            matrix = self._matrix(layer, product, run)
            self._left.append((layer, product, matrix))
            parts = {product: matrix}
            if _has_biases(adapter):
                parts[f"{product}_bias"] = self._merged_bias(adapter, layer, product)
            self._layers[layer] = {**self._layers[layer], **parts}
        self._left.reverse()
        self._num_elems = sum(matrix.numel() for _, _, matrix in self._left)

    def _matrix(self, layer: int, product: str, run: range) -> torch.Tensor:
        """A matrix in a run of pages."""
        shape, dtype = self._model.merged_form(layer, product)
        elems = self._arena.pages.view(-1)[run.start * self._arena.layout.page_elems :]
        return elems.view(dtype)[: shape.numel()].view(shape)

    def advance(self, max_seconds: float) -> bool:
        """Make the next matrix, and more while there is time; return True once all are made and steps may use them.

        If steps are captured, their captures come last, one per call. Raises CannotMerge if the adapter outweighs the
        weights; then the caller must drop the shadow.
        """
        if self.adapter is None:
            raise RuntimeError("no adapter is being merged; call begin() first")
        self._check_biases(self.adapter)
        end = time.perf_counter() + max_seconds
        has_worked = False
        while self._left:
            layer, product, matrix = self._left[-1]
            if not self._is_touched(matrix):
                has_worked = True
                if not self._touch_until(matrix, end):
                    return False
            if has_worked and (not self._pace or time.perf_counter() + self._pace * matrix.numel() > end):
                return False
            has_worked = True
            self._left.pop()
            self._make(self.adapter, layer, product, matrix)
        self._model.use_merged(self._layers)
        captured = self._captured
        if captured is None or not captured.num_left:
            return True
        if not has_worked:
            captured.capture_next()
        return not captured.num_left

    def _check_biases(self, adapter: Adapter) -> None:
        if self._captured is not None and _has_biases(adapter):
            raise CannotMerge(
                f"adapter {adapter.name!r} has biases, and captured steps read the base model's; it is served unmerged"
            )

    def _make(self, adapter: Adapter, layer: int, product: str, matrix: torch.Tensor) -> None:
        modules = self._lora.modules(layer, product)
        parts = [part for part in self._lora.in_layers.rows_of(adapter) if changes(part, layer, modules)]
        began = time.perf_counter()
        growth = self._model.merge(layer, product, parts, self._origin(layer, product), matrix)
        most = MOST_GROWTH[matrix.itemsize]
        if not growth <= most:
            raise CannotMerge(
                f"adapter {adapter.name!r} makes a row of layer {layer}'s {product} weights "
                f"{growth:.3g} times as large, but rounding allows {most:g}; it is served unmerged"
            )
        self._pace, self._num_touched = (time.perf_counter() - began) / matrix.numel(), 0

    def _merged_bias(self, adapter: Adapter, layer: int, product: str) -> torch.Tensor:
        """The biases of a product's outputs with an adapter's instead of the base model's."""
        modules = self._lora.columns(layer, product)
        base = self._model.layers[layer].get(f"{product}_bias")
        device, outputs = self._arena.pages.device, sum(width for _, _, width in modules)
        bias = torch.zeros(outputs, device=device) if base is None else base.to(torch.float32, copy=True)
        for part in self._lora.in_layers.rows_of(adapter):
            for module, column, width in modules:
                if (found := vectors_of(part, self._arena.pages, layer, module, width)) is not None:
                    bias[column : column + width].mul_(found[0]).add_(found[1])
        return bias.to(self._model.bias_dtype)

    def _touch_until(self, matrix: torch.Tensor, end: float) -> bool:
        """Touch a matrix piece by piece while there is time for another; return True once all of it is touched."""
        began = time.perf_counter()
        for pieces in itertools.count(1):
            if self._touch(matrix):
                return True
            now = time.perf_counter()
            if now + (now - began) / pieces > end:
                return False
        raise AssertionError

    def _is_touched(self, matrix: torch.Tensor) -> bool:
        """True if a matrix has its memory: on a GPU, if it is small, or once `_touch` has finished."""
        is_small = matrix.numel() * matrix.itemsize <= PIECE_BYTES
        return is_small or matrix.device.type != "cpu" or self._num_touched >= matrix.numel()

    def _touch(self, matrix: torch.Tensor) -> bool:
        """Make the system provide memory for the next piece of a matrix; return True for the last piece.

        The system does so when a page is first written. That may take longer than writing all of its data.
        """
        start, size = self._num_touched, matrix.itemsize
        matrix.view(-1)[start : start + PIECE_BYTES // size : mmap.PAGESIZE // size] = 0
        self._num_touched = min(start + PIECE_BYTES // size, matrix.numel())
        return self._num_touched == matrix.numel()

    @property
    def share_made(self) -> float:
        """Share of the matrices' elements that are made, 0 to 1."""
        left = sum([matrix.numel() for _, _, matrix in self._left])
        return 1 - left / self._num_elems if self._num_elems else 0.0

    def drop(self) -> None:
        """Drop the merged weights; their pages may then get another owner."""
        self._model.use_merged(None)
        self.adapter = None
        self._left, self._layers = [], []
        self._num_elems = self._num_touched = 0

    def check(self, adapter: Adapter) -> None:
        """Raise RuntimeError unless steps may use the merged weights and they are this adapter's."""
        if adapter is not self.adapter or self._left:
            raise RuntimeError(f"the merged weights are not ready for {adapter!r}")

    def _targets(self, adapter: Adapter) -> list[tuple[int, str]]:
        """Layer and product of each matrix that an adapter changes."""
        parts = self._lora.in_layers.rows_of(adapter)
        return [
            (layer, product)
            for layer in range(len(self._model.layers))
            for product in self._lora.merged(layer)
            if any(changes(part, layer, self._lora.modules(layer, product)) for part in parts)
        ]

    def _origin(self, layer: int, product: str) -> Any:
        return self._model.layers[layer][product]


def changes(part: AdapterRows, layer: int, modules: Sequence[int]) -> bool:
    """True if a part of an adapter changes one of these modules in a layer."""
    addresses = part.a_offset if part.vectors is None else part.vectors[layer]
    return part.first_elem[layer] >= 0 and any(addresses[module] >= 0 for module in modules)


def _has_biases(adapter: Adapter) -> bool:
    """True if the adapter has outputs of other biases than the base model's; scales are of these, too."""
    modules = adapter.manifest.modules
    return any(
        each.has_bias
        or each.has_lora_bias
        or (
            (each.has_scale or each.has_scale_of_next)
            and (modules is None or modules.has_bias(each.layer, each.module))
        )
        for each in adapter.manifest.vectors
    )
