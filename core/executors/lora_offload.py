"""CPU LoRA offload (CaraServe §4): worker threads that compute x·A·B for prompts whose adapter is still being copied.

Each worker has its own processor. A step offloads the rows of an adapter to the workers, layer by layer, until the
layer is in the adapter's pages; from then on SGMV computes it. The workers read A and B from the host image.

This module serves steps on the CPU, which offload rows through the native library; `cuda_lora_offload` extends it for a
GPU.

Tests: tests/core/executors/test_lora_offload.py
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...memory.pages.adapter_layout import AdapterLayout, uniform_parts
from ...memory.pages.projections import Role
from ...ops.cpu.lora_offload import OffloadedSegments, OffloadWorkers, most_offloaded, post_exchange
from ...ops.lora.sgmv import AdapterRows, Segments
from ..cold_start import Arrival, ColdStart, ColdStarts, CpuLoraCost, Stalls, stalls
from ..config import EngineConfig
from ..model.specs.config import ModelConfig
from ..requests.types import StepPlan
from .adapters import Coming, ModelAdapters

logger = logging.getLogger(__name__)

#: Seconds per element of a copy before any copy was seen: nothing is expected to arrive.
_UNKNOWN_PACE = 1.0

#: A worker gets only as many rows as take it at least this many times as long as an exchange.
_WORTH_AN_EXCHANGE = 8

_PROFILE_ROUNDS, _PROFILE_TOKENS, _PROFILE_RANK = 20, 64, 16


@dataclass(frozen=True, slots=True)
class OffloadProfile:
    """Measured speed of an offload worker on this machine."""

    exchange: float
    """Seconds to send a row and get its LoRA term back."""
    per_elem: float
    """Seconds per token and element of A or B."""

    def cost(self, layout: AdapterLayout, workers: int) -> CpuLoraCost:
        """Cost of an adapter as if it had rank 1, with four exchanges a layer."""
        exchanges, seconds = self.exchange * 4 * layout.num_layers, self.per_elem * layout.num_elems
        each = max(1, math.ceil(_WORTH_AN_EXCHANGE * exchanges / seconds)) if seconds else 1
        return CpuLoraCost(exchanges, per_token_rank=seconds, cores=workers, tokens_each=each)


class LoraOffload:
    """The offload workers of an executor, and the choice between offloading and waiting for layers.

    Set `adapters`, and call `measure`, before the first step.
    """

    adapters: ModelAdapters

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        dtype: torch.dtype,
        most_rows: int | None = None,
        *,
        is_woken: bool = True,
    ) -> None:
        """most_rows: the most tokens offloaded at once; by default, a step's. is_woken: see `OffloadWorkers`."""
        self._num_workers, self._dtype = config.offload_workers, dtype
        self._projections = projections = model.projections
        latents = (each.name for layer in projections.layers for each in layer if each.product == Role.KV_UP)
        self._awaited = {projections.id(name) for name in (*projections.mixture, *latents)}
        # each part of an adapter has rows of its own
        parts = len(uniform_parts(projections, 1))
        self._most_rows = parts * max(_PROFILE_TOKENS, most_rows or config.max_num_batched_tokens)
        cpus = offload_worker_cpus(self._num_workers)
        self._workers = OffloadWorkers(projections.gemm_shapes, dtype, self._most_rows, cpus, is_woken=is_woken)
        self.starts = ColdStarts()
        """Counts of the choices made."""
        self.cold_start: ColdStart | None = None
        """None: the cost model chooses; else this is always chosen, for studies."""
        self.profile = OffloadProfile(0.0, 0.0)
        self.offloaded: OffloadedSegments | None = None
        """The segments that the last step offloaded."""
        # the step's adapters in transit, by the address of their count of arrived layers
        self._coming: dict[int, Coming] = {}
        self._chosen: dict[int, tuple[int, ColdStart]] = {}  # their tokens, and how they begin
        self._began = 0.0
        self._per_token = 0.0  # seconds per token of a step with prompts and no adapters in transit
        self._per_elem = _UNKNOWN_PACE

    def measure(self) -> None:
        """Measure the workers' profile."""
        one, many = self._time_exchange(1), self._time_exchange(_PROFILE_TOKENS)
        inputs, ((_, _, width), *_), _ = self._projections.gemm_shapes[0]
        elems = _PROFILE_RANK * (inputs + width)
        self.profile = OffloadProfile(one, max(0.0, many - one) / (elems * (_PROFILE_TOKENS - 1)))
        logger.info(
            "%d offload workers: an exchange takes %.0f µs, a token %.2f ns per element of an adapter",
            self._num_workers,
            1e6 * one,
            1e9 * self.profile.per_elem,
        )

    def run(self, forward: Callable[[StepPlan], torch.Tensor], plan: StepPlan) -> torch.Tensor:
        """Run a step that has completed when `forward` returns."""
        self.begin_step(plan)
        try:
            return forward(plan)
        finally:
            self.end_step(plan)

    def begin_step(self, plan: StepPlan) -> None:
        """Prepare a step. `begin` later chooses the work to offload, when the segments are known."""
        coming = ((adapter.transfer, self.adapters.coming) for adapter in plan.adapters if adapter.transfer is not None)
        self._coming = {transfer.address: known[transfer] for transfer, known in coming if transfer in known}
        self._began = time.monotonic()
        if self._coming:
            self.offloaded, self._chosen = None, {}

    def end_step(self, plan: StepPlan) -> None:
        """Finish a step after it was computed."""
        now = time.monotonic()
        if not self._coming:
            if plan.num_tokens - plan.num_drafts > len(plan.sequences):
                self._per_token = (now - self._began) / plan.num_tokens
            return
        if self.offloaded is not None:
            self._workers.end()
        for address, (tokens, cold_start) in self._chosen.items():
            coming = self._coming[address]
            if arrived := max(0, layers_at(address)):
                per_layer = (now - coming.began) / arrived
                self._per_elem = per_layer * coming.layout.num_layers / coming.layout.num_elems
            # the choice is priced again, with the copy's pace as known after the step
            whole = self._arrival(coming, arrived, now)
            arrival = Arrival(whole.layers, whole.first, whole.first * whole.layers)
            self.starts.regret_seconds += self._price(arrival, coming, tokens).regret(cold_start)

    def begin(self, segments: Segments) -> OffloadedSegments | None:
        """See `Offloading.begin`."""
        now, entries, row, images = time.monotonic(), [], [0], []
        for address, coming in self._coming.items():
            if layers_at(address) == coming.layout.num_layers:
                continue
            own = [index for index, ready in enumerate(segments.ready) if ready == address]
            lengths = [segments.end[index] - segments.begin[index] for index in own]
            fits = row[-1] + sum(lengths) <= self._most_rows and len(entries) + len(own) <= most_offloaded()
            image = coming.image.data if fits and not self._is_awaited(coming.layout) else None
            if self._is_offloaded(address, coming, sum(lengths), now, can=image is not None):
                entries += own
                images += [image] * len(own)
                row += [*itertools.accumulate(lengths, initial=row[-1])][1:]
        return self._begin_offload(segments, entries, row, images) if entries else None

    def _is_awaited(self, layout: AdapterLayout) -> bool:
        """True if an adapter changes what workers do not compute, mixtures of experts or keys and values of latents, or
        has vectors, which come after what LoRA adds: a step must wait for each of its layers.
        """
        offsets = (part.slabs.a_offset for part in layout.parts)
        return layout.vectors is not None or any(own[module] >= 0 for own in offsets for module in self._awaited)

    def _is_offloaded(self, address: int, coming: Coming, tokens: int, now: float, *, can: bool) -> bool:
        """Choose how a request starts whose adapter is still loading. Requests that must wait for all layers are not in
        the step (`LoadPolicy`), so this never chooses to wait. can: its tokens can be offloaded.
        """
        cold_start = self.cold_start
        if cold_start is None:
            found = self._price(self._arrival(coming, max(0, layers_at(address)), now), coming, tokens)
            cold_start = ColdStart.OFFLOAD if found.offload < found.stream else ColdStart.STREAM
        if not can:
            cold_start = ColdStart.STREAM
        self._chosen[address] = tokens, cold_start
        if not coming.is_counted:
            coming.is_counted = True
            self.starts.count(cold_start)
        return cold_start is ColdStart.OFFLOAD

    def _arrival(self, coming: Coming, arrived: int, now: float) -> Arrival:
        """Estimate an adapter's arrival from its own pace; before its first layer, from that of earlier copies."""
        layers, elapsed = coming.layout.num_layers, now - coming.began
        each = elapsed / arrived if arrived else max(elapsed, self._per_elem * coming.layout.num_elems / layers)
        return Arrival(layers, each, each * (layers - arrived), arrived)

    def _price(self, arrival: Arrival, coming: Coming, tokens: int) -> Stalls:
        cpu, returned = self._cost(coming).seconds(tokens, 1), self._returned_seconds(coming.layout, tokens)
        return stalls(arrival, self._per_token * tokens, cpu, returned)

    def _returned_seconds(self, layout: AdapterLayout, tokens: int) -> float:
        """Seconds that the LoRA terms of all layers take on the link that the adapter uses."""
        return 0.0

    def _cost(self, coming: Coming) -> CpuLoraCost:
        return self.profile.cost(coming.layout, self._num_workers)

    def _begin_offload(
        self, segments: Segments, entries: Sequence[int], row: Sequence[int], images: Sequence[Any]
    ) -> OffloadedSegments:
        comings = [self._coming[segments.ready[index]] for index in entries]
        share = shares(row[-1], max(int(self._cost(coming).tokens_each) for coming in comings), self._num_workers)
        # the image has its pages in order, unlike the arena
        rows = [replace(part, pages=range(len(part.pages))) for part in map(segments.rows.__getitem__, entries)]
        self._workers.begin(rows, row, share, images)
        self.offloaded = OffloadedSegments(
            ranks=self._workers.ranks,
            entries=entries,
            row=row,
            share=share,
            image_ready=[coming.image.stream.address for coming in comings],
            exchanges=self._workers.exchanges,
        )
        return self.offloaded

    def _time_exchange(self, tokens: int) -> float:
        """Median seconds to send a worker inputs of the first projection and get an adapter of zeros' terms back."""
        hidden, ((module, _, width), *_), _ = self._projections.gemm_shapes[0]
        ids = range(len(self._projections))
        rows = AdapterRows(
            pages=[0],
            rank=_PROFILE_RANK,
            scale=1.0,
            slab_elems=hidden + width,
            a_offset=[0 if each == module else -1 for each in ids],
            b_offset=[hidden if each == module else -1 for each in ids],
            first_elem=(0,),
        )
        x, image = torch.zeros(tokens, hidden), torch.zeros(1, _PROFILE_RANK * (hidden + width), dtype=self._dtype)
        share = [0, *[tokens] * self._num_workers]
        self._workers.begin([rows], [0, tokens], share, [image])
        found = []
        for _ in range(_PROFILE_ROUNDS):
            began = time.perf_counter()
            self._exchange_once(x, share)
            found.append(time.perf_counter() - began)
        self._workers.end()
        return statistics.median(found)

    def _exchange_once(self, x: torch.Tensor, share: Sequence[int]) -> None:
        """Send rows of one offloaded segment's input of the first GEMM, and wait for the LoRA terms."""
        post_exchange(self._workers.ranks, self._workers.exchanges, x, self._dtype)
        self._workers.ranks.meet()

    def close(self) -> None:
        self._workers.close()


def shares(rows: int, each: int, workers: int) -> list[int]:
    """Return where each worker's rows begin, and the end of the last.

    The rows are split evenly among as few workers as possible, such that none has more than `each`, if there are enough
    workers.
    """
    used = max(1, min(workers, -(-rows // each)))
    return [rows * min(index, used) // used for index in range(workers + 1)]


def offload_worker_cpus(workers: int) -> list[int | None]:
    """Choose processors for the offload workers: the last ones that the process may use, but never the first; shared if
    there are too few.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [None] * workers
    cpus = sorted(os.sched_getaffinity(0))
    own = cpus[max(1, len(cpus) - workers) :]
    return [own[index % len(own)] if own else None for index in range(workers)]


def layers_at(address: int) -> int:
    """The number of an adapter's layers that have arrived, from the address of the count."""
    return ctypes.c_int32.from_address(address).value
