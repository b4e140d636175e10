"""CPU LoRA offload (CaraServe §4): worker processes that compute x·A·B for prompts whose adapter is still being copied.

Each worker has its own processor. A step offloads the rows of an adapter to the workers, layer by layer, until the
layer is in the adapter's pages; from then on SGMV computes it. The workers read A and B from the host image, which is
in shared memory like all inputs and results. If a worker ends, its rows are void and wait for their adapter, as do all
later ones.

This module serves steps on the CPU, which offload rows through the native library; `cuda_lora_offload` extends it for a
GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...memory.host.image import HostImage
from ...memory.pages.adapter_layout import AdapterLayout, uniform_parts
from ...memory.pages.projections import Role
from ...memory.transfers.dma import Dma
from ...memory.transfers.pinned import PinnedBuffers
from ...memory.transfers.transfer import ExecutorLost, Transfer
from ...ops.cpu.lora_offload import OffloadedSegments, exchange_floats, exchanges_bytes, most_offloaded, post_exchange
from ...ops.lora.sgmv import AdapterRows, Segments
from ..cold_start import Arrival, ColdStart, ColdStarts, CpuLoraCost, Stalls, stalls
from ..config import EngineConfig
from ..model.specs.config import ModelConfig
from ..requests.types import StepPlan
from .adapters import ModelAdapters
from .offload_worker import OffloadWorkerProcess
from .shared_memory import MemoryLayout, Pinning, SharedMemory, image_bytes
from .worker_processes import WorkerProcesses

logger = logging.getLogger(__name__)

#: Seconds that a step waits for an offload worker before all of them are abandoned.
PATIENCE_SECONDS = 5.0

#: Seconds per element of a copy before any copy was seen: nothing is expected to arrive.
_UNKNOWN_PACE = 1.0

#: A worker gets only as many rows as take it at least this many times as long as an exchange.
_WORTH_AN_EXCHANGE = 8

_PROFILE_ROUNDS, _PROFILE_TOKENS, _PROFILE_RANK = 20, 64, 16


@dataclass(slots=True)
class _Coming:
    """An adapter being copied into its pages."""

    image: HostImage
    layout: AdapterLayout
    began: float
    """When its copy began."""
    is_counted: bool = False
    """True once a step has started with it."""

    def arrival(self, arrived: int, now: float, per_elem: float) -> Arrival:
        """Estimate its arrival from its own pace; before its first layer, from `per_elem`, earlier copies' pace."""
        layers, elapsed = self.layout.num_layers, now - self.began
        each = elapsed / arrived if arrived else max(elapsed, per_elem * self.layout.num_elems / layers)
        return Arrival(layers, each, each * (layers - arrived), arrived)


@dataclass(frozen=True, slots=True)
class OffloadProfile:
    """Measured speed of an offload worker on this machine."""

    exchange: float
    """Seconds to send a row and get its LoRA term back."""
    per_elem: float
    """Seconds per token and element of A or B."""

    def cost(self, layout: AdapterLayout, exchanges: int, workers: int) -> CpuLoraCost:
        """Cost of an adapter as if it had rank 1. exchanges: of all layers together."""
        seconds = self.per_elem * layout.num_elems
        each = max(1, math.ceil(_WORTH_AN_EXCHANGE * self.exchange * exchanges / seconds)) if seconds else 1
        return CpuLoraCost(self.exchange * exchanges, per_token_rank=seconds, cores=workers, tokens_each=each)


class OffloadAdapters(ModelAdapters):
    """Reads adapters into memory that the offload workers share, and tracks the images of adapters being copied."""

    coming: weakref.WeakKeyDictionary[Transfer, _Coming]

    def share(self, memory: SharedMemory) -> None:
        """Read into this memory from now on."""
        self.dma = Dma(self.dma.copies, PinnedBuffers(memory, memory.layout.room_bytes))
        self.coming = weakref.WeakKeyDictionary()

    def load(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> Transfer | None:
        began = time.monotonic()
        transfer = super().load(image, layout, pages)
        if transfer is not None:
            self.coming[transfer] = _Coming(image, layout, began)
        return transfer


class LoraOffload:
    """The offload workers of an executor, and the choice between offloading and waiting for layers.

    Call `use_adapters` before the first step.
    """

    adapters: OffloadAdapters

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        page_elems: int,
        dtype: torch.dtype,
        most_rows: int | None = None,
        pinning: Pinning | None = None,
    ) -> None:
        """most_rows: the most tokens offloaded at once; by default, a step's. pinning: of the device that is rank
        0 instead of this process's processors.
        """
        self._workers = workers = config.offload_workers
        self._dtype, self._page_elems = dtype, page_elems
        self._projections = model.projections
        latents = (each.name for layer in model.projections.layers for each in layer if each.product == Role.KV_UP)
        self._awaited = {model.projections.id(name) for name in (*model.projections.mixture, *latents)}
        self._gemm_shapes = gemm_shapes = model.projections.gemm_shapes
        # each part of an adapter has rows of its own
        parts = len(uniform_parts(model.projections, 1))
        self._most_rows = parts * max(_PROFILE_TOKENS, most_rows or config.max_num_batched_tokens)
        layout = MemoryLayout(
            1 + workers,
            exchange_floats(gemm_shapes, self._most_rows),
            exchanges_bytes(),
            image_bytes(config.host_bytes),
            is_woken=pinning is None,
        )
        fd = SharedMemory.create(layout)
        try:
            self._memory = SharedMemory(fd, layout, pinning)
            self._ranks = self._memory.ranks(0, PATIENCE_SECONDS)
            cpus = offload_worker_cpus(workers)
            makers = {
                f"offload worker {number} of {workers}": partial(
                    OffloadWorkerProcess,
                    layout=layout,
                    number=number,
                    gemm_shapes=gemm_shapes,
                    dtype=dtype,
                    page_elems=self._page_elems,
                    cpu=cpus[number - 1],
                )
                for number in range(1, 1 + workers)
            }
            self._processes = WorkerProcesses(makers, fd, self._ranks, PATIENCE_SECONDS)
        finally:
            os.close(fd)
        self.starts = ColdStarts()
        """Counts of the choices made."""
        self.cold_start: ColdStart | None = None
        """None: the cost model chooses; else this is always chosen, for studies."""
        self.profile = OffloadProfile(0.0, 0.0)
        self.offloaded: OffloadedSegments | None = None
        """The segments that the last step offloaded."""
        # the step's adapters in transit, by the address of their count of arrived layers
        self._coming: dict[int, _Coming] = {}
        self._chosen: dict[int, tuple[int, ColdStart]] = {}  # their tokens, and how they begin
        self._images: list[Any] = []  # of offloaded segments
        self._step, self._began = 0, 0.0
        self._per_token = 0.0  # seconds per token of a step with prompts and no adapters in transit
        self._per_elem = _UNKNOWN_PACE
        self._is_lost = False

    def use_adapters(self, adapters: OffloadAdapters) -> None:
        """Offload these adapters from now on."""
        adapters.share(self._memory)
        self.adapters = adapters

    def join(self) -> None:
        """Wait until the offload workers are ready, and measure their profile."""
        try:
            self._processes.join()
            one, many = self.time_exchange(1, 1), self.time_exchange(_PROFILE_TOKENS, 1)
        except BaseException:
            self.close()
            raise
        inputs, (_, _, width) = self._gemm_shapes[0].inputs, self._gemm_shapes[0].modules[0]
        elems = _PROFILE_RANK * (inputs + width)
        self.profile = OffloadProfile(one, max(0.0, many - one) / (elems * (_PROFILE_TOKENS - 1)))
        logger.info(
            "%d offload workers: an exchange takes %.0f µs, a token %.2f ns per element of an adapter",
            self._workers,
            1e6 * one,
            1e9 * self.profile.per_elem,
        )

    @property
    def pids(self) -> list[int]:
        return self._processes.pids

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
        if self._coming:
            self._end()
        elif plan.num_tokens - plan.num_drafts > len(plan.sequences):
            self._per_token = (time.monotonic() - self._began) / plan.num_tokens

    def begin(self, segments: Segments) -> OffloadedSegments | None:
        """See `Offloading.begin`."""
        now, entries, offsets, row = time.monotonic(), [], [], [0]
        for address, coming in self._coming.items():
            if layers_at(address) == coming.layout.num_layers:
                continue
            own = [index for index, ready in enumerate(segments.ready) if ready == address]
            lengths = [segments.end[index] - segments.begin[index] for index in own]
            fits = row[-1] + sum(lengths) <= self._most_rows and len(entries) + len(own) <= most_offloaded()
            fits = fits and coming.layout.vectors is None  # which come after what LoRA adds
            fits = fits and not self._is_awaited(coming.layout)
            offset = self._offset_to_offload(address, coming, sum(lengths), now, fits)
            if offset is not None:
                entries += own
                offsets += [offset] * len(own)
                row += [*itertools.accumulate(lengths, initial=row[-1])][1:]
        return self._begin_offload(segments, entries, offsets, row) if entries else None

    def _is_awaited(self, layout: AdapterLayout) -> bool:
        """True if an adapter changes what workers do not compute, mixtures of experts or keys and values of latents: a
        step must wait for each of its layers.
        """
        offsets = (part.slabs.a_offset for part in layout.parts)
        return any(own[module] >= 0 for own in offsets for module in self._awaited)

    def _offset_to_offload(self, address: int, coming: _Coming, tokens: int, now: float, fits: bool) -> int | None:
        """Return where the offload workers find an adapter whose tokens they compute; None if the step waits for it."""
        offset = None if coming.image.data is None else self._memory.offset(coming.image.data)
        cold_start = self._choose(address, coming, tokens, now)
        if offset is None or not fits or self._is_lost:
            cold_start = ColdStart.STREAM
        self._chosen[address] = tokens, cold_start
        if not coming.is_counted:
            coming.is_counted = True
            self.starts.count(cold_start)
        return offset if cold_start is ColdStart.OFFLOAD else None

    def _choose(self, address: int, coming: _Coming, tokens: int, now: float) -> ColdStart:
        """Choose how a request starts whose adapter is still loading. Requests that must wait for all layers are not
        in the step (`LoadPolicy`), so this never chooses to wait.
        """
        if self.cold_start is not None:
            return self.cold_start
        found = self._stalls(address, coming, tokens, now)
        return ColdStart.OFFLOAD if found.offload < found.stream else ColdStart.STREAM

    def _stalls(self, address: int, coming: _Coming, tokens: int, now: float) -> Stalls:
        arrival = coming.arrival(max(0, layers_at(address)), now, self._per_elem)
        return self._price(arrival, coming, tokens)

    def _price(self, arrival: Arrival, coming: _Coming, tokens: int) -> Stalls:
        cpu, returned = self._cost(coming).seconds(tokens, 1), self._returned_seconds(coming.layout, tokens)
        return stalls(arrival, self._per_token * tokens, cpu, returned)

    def _returned_seconds(self, layout: AdapterLayout, tokens: int) -> float:
        """Seconds that the LoRA terms of all layers take on the link that the adapter uses."""
        return 0.0

    def _cost(self, coming: _Coming) -> CpuLoraCost:
        return self.profile.cost(coming.layout, 4 * coming.layout.num_layers, self._workers)

    def _begin_offload(
        self, segments: Segments, entries: Sequence[int], offsets: Sequence[int], row: Sequence[int]
    ) -> OffloadedSegments | None:
        comings = [self._coming[segments.ready[index]] for index in entries]
        share = shares(row[-1], max(int(self._cost(coming).tokens_each) for coming in comings), self._workers)
        # the image has its pages in order, unlike the arena
        rows = [replace(part, pages=range(len(part.pages))) for part in map(segments.rows.__getitem__, entries)]
        try:
            self._begin(rows, row, share, offsets)
        except ExecutorLost as error:
            self._give_up(error)
            return None
        self._images = [coming.image.data for coming in comings]  # kept, whatever happens to the reads
        self.offloaded = OffloadedSegments(
            ranks=self._ranks,
            entries=entries,
            row=row,
            share=share,
            image_ready=[coming.image.stream.address for coming in comings],
            exchanges=self._memory.exchanges,
        )
        return self.offloaded

    def _begin(
        self, rows: Sequence[AdapterRows], row: Sequence[int], share: Sequence[int], offsets: Sequence[int]
    ) -> None:
        """Make the offload workers wait for exchanges. Raises ExecutorLost."""
        self._step += 1
        self._ranks.begin(self._step)
        self._processes.send("serve", self._step, rows, row, share, offsets)

    def _finish(self) -> None:
        """Make the offload workers leave the step. Raises ExecutorLost, or their error."""
        self._ranks.fail(self._step)
        self._processes.answers()

    def _end(self) -> None:
        """Finish a step with adapters in transit."""
        if self.offloaded is not None:
            try:
                self._finish()
            except Exception as error:
                self._give_up(error)
            self._images = []
        now = time.monotonic()
        for address, (tokens, cold_start) in self._chosen.items():
            coming = self._coming[address]
            if arrived := max(0, layers_at(address)):
                per_layer = (now - coming.began) / arrived
                self._per_elem = per_layer * coming.layout.num_layers / coming.layout.num_elems
            self.starts.regret_seconds += self._hindsight(coming, tokens, arrived, now).regret(cold_start)

    def _hindsight(self, coming: _Coming, tokens: int, arrived: int, now: float) -> Stalls:
        """Price each choice again, with the copy's pace as known after the step."""
        whole = coming.arrival(arrived, now, self._per_elem)
        arrival = Arrival(whole.layers, whole.first, whole.first * whole.layers)
        return self._price(arrival, coming, tokens)

    def _give_up(self, error: Exception) -> None:
        """Offload nothing from now on: prompts wait for their adapters."""
        if not self._is_lost:
            self._is_lost = True
            self._ranks.lose()
            logger.error("no prompt is offloaded any more until the next start: %s", error)

    def time_exchange(
        self, tokens: int, workers: int, rank: int = _PROFILE_RANK, rounds: int = _PROFILE_ROUNDS
    ) -> float:
        """Median seconds to send inputs of the first projection and get the LoRA terms of an adapter of zeros back.

        workers: number of offload workers that share the tokens.
        """
        hidden, (module, _, width) = self._gemm_shapes[0].inputs, self._gemm_shapes[0].modules[0]
        pages = range(-(-rank * (hidden + width) // self._page_elems))
        image = self.adapters.dma.buffers.take((len(pages), self._page_elems), self._dtype).zero_()
        offset = self._memory.offset(image)
        if offset is None:
            raise MemoryError(f"host_cache_bytes leaves no room for the {image.nbytes} bytes of a profile; raise it")
        ids = range(len(self._projections))
        rows = AdapterRows(
            pages=pages,
            rank=rank,
            scale=1.0,
            slab_elems=hidden + width,
            a_offset=[0 if each == module else -1 for each in ids],
            b_offset=[hidden if each == module else -1 for each in ids],
            first_elem=(0,),
        )
        x = torch.zeros(tokens, hidden)
        share = [*shares(tokens, 1, workers), *[tokens] * (self._workers - workers)]
        self._begin([rows], [0, tokens], share, [offset])
        found = []
        for _ in range(rounds):
            began = time.perf_counter()
            self._exchange_once(x, share)
            found.append(time.perf_counter() - began)
        self._finish()
        return statistics.median(found)

    def _exchange_once(self, x: torch.Tensor, share: Sequence[int]) -> None:
        """Send rows of one offloaded segment's input of the first GEMM, and wait for the LoRA terms."""
        post_exchange(self._ranks, self._memory.exchanges, x, self._dtype)
        self._ranks.meet()

    def close(self) -> None:
        self._processes.close()
        self._memory.close()


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
