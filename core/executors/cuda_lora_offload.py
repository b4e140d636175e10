"""CPU LoRA offload of steps on a GPU: the GPU's side of `lora_offload`.

The host launches a step's layers before the device has computed them. Therefore a step offloads the layers that are not
in their pages when the host launches them. Only the device waits for the offload workers.

Tests: tests/core/executors/test_cuda_lora_offload.py
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ...graphs.device import CudaDevice
from ...memory.pages.adapter_layout import AdapterLayout
from ...memory.pages.projections import Projections
from ...memory.transfers.cuda_driver import CupyDriver
from ...ops.cpu.lora_offload import OffloadedSegments
from ...ops.lora.sgmv import AdapterRows, Segments
from ...ops.lora.sgmv_tables import SgmvTables
from ..config import EngineConfig
from ..model.specs.config import ModelConfig
from ..requests.types import StepPlan
from .cuda_exchange import CudaExchange
from .lora_offload import LoraOffload, layers_at

T = TypeVar("T")

#: The most rows that a step offloads. From 1.84 r rows on (r: the rank, at most 256) it gains nothing, and pinned
#: memory has room for each worker's rows of the widest projections, twice.
MOST_ROWS = 512


class CudaLoraOffload(LoraOffload):
    """The offload workers of a GPU executor. One step at a time offloads rows, and one thread at a time may use it."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: CudaDevice, driver: CupyDriver
    ) -> None:
        super().__init__(config, model, dtype, min(MOST_ROWS, config.max_num_batched_tokens), is_woken=False)
        self._device, self._driver = device, driver
        driver.pin(self._workers.address, len(self._workers.memory))
        self._exchange = CudaExchange(
            ranks=self._workers.ranks,
            exchanges=self._workers.exchanges,
            driver=driver,
            gemm_shapes=self._projections.gemm_shapes,
            dtype=dtype,
            most_rows=self._most_rows,
            device=device.torch_device,
        )
        self._uses = _uses(model.projections)
        self._plan: StepPlan | None = None  # of the step in flight
        self._step_offload: CudaStepOffload | None = None  # of the step in flight

    def launch(self, forward: Callable[[], T], plan: StepPlan) -> T:
        """Launch a step; call `end` once its tokens are back, or never.

        A step launched before the previous one has ended offloads nothing, and neither of the two is timed.
        """
        is_behind = self._plan is not None
        self._abandon()
        self.begin_step(plan)
        self._plan = plan
        try:
            result = forward()
        except BaseException:
            self._abandon()
            raise
        if is_behind and self._step_offload is None:
            self._plan = None
        return result

    def offload(self, segments: Segments, lora_indices: Sequence[int], tables: SgmvTables) -> CudaStepOffload | None:
        """Choose the segments of a step to offload, before its tables are written; see `CudaLoraState.offloading`."""
        offloaded = self.begin(segments)
        if offloaded is not None:
            self._step_offload = CudaStepOffload(
                self._exchange,
                offloaded,
                segments=segments,
                lora_indices=lora_indices,
                tables=tables,
                projections=self._projections,
            )
        return self._step_offload

    def end(self, plan: StepPlan) -> None:
        """End a launched step that the device has completed."""
        if plan is self._plan:
            self._plan = self._step_offload = None
            self.end_step(plan)

    def close(self) -> None:
        super().close()
        self._driver.unpin(self._workers.address)

    def _abandon(self) -> None:
        """End a step whose tokens are not needed, or that another step follows."""
        if self._plan is not None and self._step_offload is not None:
            self._device.synchronize()
            self.end(self._plan)
        self._plan = None

    def _returned_seconds(self, layout: AdapterLayout, tokens: int) -> float:
        targets = {module for part in layout.parts for module, at in enumerate(part.slabs.b_offset) if at >= 0}
        values = tokens * sum(
            uses * outputs for uses, outputs, modules in self._uses if not targets.isdisjoint(modules)
        )
        return self._per_elem * values * torch.float32.itemsize / self._dtype.itemsize

    def _exchange_once(self, x: torch.Tensor, share: Sequence[int]) -> None:
        with self._device.scope():
            self._exchange.input_rows(0, len(x)).copy_(x)
            self._exchange.offload(0, 0, [0], len(x))
            self._exchange.collect(0, share)
            self._device.synchronize()


def _uses(projections: Projections) -> list[tuple[int, int, list[int]]]:
    """For each size of GEMM: how many layers have it, its outputs, and its modules."""
    uses = Counter(itertools.chain.from_iterable(own.values() for own in projections.gemm_shape_of))
    shapes = enumerate(projections.gemm_shapes)
    return [(uses[index], each.outputs, [module for module, _, _ in each.modules]) for index, each in shapes]


class CudaStepOffload:
    """The part of a GPU step that is offloaded, while the step is launched layer by layer; see `StepOffload`."""

    def __init__(
        self,
        exchange: CudaExchange,
        offloaded: OffloadedSegments,
        segments: Segments,
        lora_indices: Sequence[int],
        tables: SgmvTables,
        projections: Projections,
    ) -> None:
        """Give each offloaded segment its own descriptor, in which the offloaded layers are left out."""
        self._exchange, self._offloaded, self._tables = exchange, offloaded, tables
        self._gemm_shapes = projections.gemm_shapes
        self._places = [range(segments.begin[entry], segments.end[entry]) for entry in offloaded.entries]
        self._ready = [segments.ready[entry] for entry in offloaded.entries]
        self._rows = [replace(segments.rows[entry]) for entry in offloaded.entries]
        self._of_slot: defaultdict[int, list[int]] = defaultdict(list)
        for index, (entry, rows) in enumerate(zip(offloaded.entries, self._rows, strict=True)):
            segments.rows[entry] = rows
            self._of_slot[lora_indices[entry]].append(index)
        self._active: defaultdict[int, list[int]] = defaultdict(list)  # indices of the offloaded segments, by layer
        self._under_way: list[int] = []  # of the GEMM being offloaded
        offloaded.layers = self._layers = [0] * len(offloaded.entries)

    def takes(self, lora_index: int, layer: int) -> bool:
        own, offloaded = self._of_slot.get(lora_index), self._offloaded
        if not own or layers_at(self._ready[own[0]]) > layer or layers_at(offloaded.image_ready[own[0]]) <= layer:
            return False
        for index in own:
            if self._rows[index].first_elem[layer] >= 0:
                self._tables.leave_out(self._rows[index], layer)
                self._active[layer].append(index)
                self._layers[index] += 1
        return True

    def offload(self, shape: int, x: torch.Tensor, layer: int) -> None:
        self._under_way = [index for index in self._active.get(layer, ()) if self._changes(self._rows[index], shape)]
        if not self._under_way:
            return
        row = self._offloaded.row
        given = self._exchange.input_rows(shape, row[-1])
        for index in self._under_way:
            tokens = self._places[index]
            given[row[index] : row[index + 1]].copy_(x[tokens.start : tokens.stop])
        self._exchange.offload(shape, layer, self._under_way, row[-1])

    def collect(self, shape: int, y: torch.Tensor, layer: int) -> None:
        if not self._under_way:
            return
        row, terms = self._offloaded.row, self._exchange.collect(shape, self._offloaded.share)
        for index in self._under_way:
            tokens = self._places[index]
            y[tokens.start : tokens.stop].add_(terms[row[index] : row[index + 1]])
        self._under_way = []

    def _changes(self, rows: AdapterRows, shape: int) -> bool:
        return any(rows.b_offset[module] >= 0 for module, _, _ in self._gemm_shapes[shape].modules)
