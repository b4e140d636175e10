"""CPU LoRA offload (CaraServe §4): worker processes that compute x·A·B of prompts whose adapter is still being copied.

Each has a processor of its own. A step offloads the rows of an adapter to them, layer by layer, until the layer is in
the adapter's pages; from there on SGMV serves. They read A and B from the host image, which lies in shared memory like
all that is handed over. Should one end, the rows that it had are void and wait for their adapter, and so do all later
ones. What is here is of steps on the CPU, which hand rows over by the native library, and of steps on a GPU
(`cuda_lora_offload`).
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
from ...memory.pages.adapter_layout import AdapterLayout
from ...memory.pages.layout import MODULES
from ...memory.transfers.dma import Dma
from ...memory.transfers.pinned import PinnedBuffers
from ...memory.transfers.transfer import ExecutorLost, Transfer
from ...ops.lora_offload import EXCHANGES_BYTES, OffloadedSegments, exchange_floats, group_widths, post_exchange
from ...ops.native_descriptors import MAX_OFFLOADED
from ...ops.sgmv import AdapterRows, Segments
from ..cold_start import Arrival, ColdStart, ColdStarts, CpuLoraCost, Stalls, stalls
from ..config import EngineConfig
from ..model.config import ModelConfig
from ..requests.types import StepPlan
from .adapters import ModelAdapters
from .offload_worker import OffloadWorkerProcess
from .shared_memory import MemoryLayout, Pinning, SharedMemory, image_bytes
from .worker_processes import WorkerProcesses

logger = logging.getLogger(__name__)

#: Seconds that a step waits for an offload worker: then all are given up.
PATIENCE_SECONDS = 5.0

#: Seconds per element of a copy before any has been seen: nothing is expected to come.
_UNKNOWN_PACE = 1.0

#: An offload worker is given rows that take it at least so many times as long as an exchange.
_WORTH_AN_EXCHANGE = 8

_PROFILE_ROUNDS, _PROFILE_TOKENS, _PROFILE_RANK = 20, 64, 16


@dataclass(slots=True)
class _Coming:
    """An adapter on its way into its pages. began: when its copy did. is_counted: a step has begun with it."""

    image: HostImage
    layout: AdapterLayout
    began: float
    is_counted: bool = False

    def arrival(self, arrived: int, now: float, per_elem: float) -> Arrival:
        """As it looks now, by its own pace, or before its first layer by `per_elem`, that of earlier copies."""
        layers, elapsed = self.layout.num_layers, now - self.began
        each = elapsed / arrived if arrived else max(elapsed, per_elem * self.layout.num_elems / layers)
        return Arrival(layers, each, each * (layers - arrived), arrived)


@dataclass(frozen=True, slots=True)
class OffloadProfile:
    """What an offload worker takes on this machine. exchange: seconds to hand a row over and to get its product, from
    both sides; per_elem: seconds per token and element of A or B.
    """

    exchange: float
    per_elem: float

    def cost(self, layout: AdapterLayout, exchanges: int, workers: int) -> CpuLoraCost:
        """Of an adapter as if it had rank 1. exchanges: of all layers."""
        seconds = self.per_elem * layout.num_elems
        each = max(1, math.ceil(_WORTH_AN_EXCHANGE * self.exchange * exchanges / seconds)) if seconds else 1
        return CpuLoraCost(self.exchange * exchanges, per_token_rank=seconds, cores=workers, tokens_each=each)


class OffloadAdapters(ModelAdapters):
    """Reads adapters into memory that the offload workers share, and knows the images of adapters on their way."""

    coming: weakref.WeakKeyDictionary[Transfer, _Coming]

    def share(self, memory: SharedMemory) -> None:
        """Read into this memory from now on."""
        self.dma = Dma(self.dma.copies, PinnedBuffers(memory, memory.layout.room_bytes))
        self.coming = weakref.WeakKeyDictionary()

    def place(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> Transfer | None:
        began = time.monotonic()
        transfer = super().place(image, layout, pages)
        if transfer is not None:
            self.coming[transfer] = _Coming(image, layout, began)
        return transfer


class LoraOffload:
    """The offload workers of an executor, and the choice between them and waiting for layers. `use_adapters` comes
    before the first step.

    starts: what was chosen. cold_start: None: chosen by the cost model; else always so, for studies.
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
        """most_rows: that are handed over at once; by default as a step has. pinning: of the device that is rank
        0 in place of this process's processors.
        """
        self._workers = workers = config.offload_workers
        self._dtype, self._page_elems = dtype, page_elems
        self._shapes = model.hidden_size, model.intermediate_size, model.q_size, model.kv_size
        self._widths = group_widths(self._shapes)
        self._most_rows = max(_PROFILE_TOKENS, most_rows or config.max_num_batched_tokens)
        layout = MemoryLayout(
            1 + workers,
            exchange_floats(self._shapes, self._most_rows),
            EXCHANGES_BYTES,
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
                    OffloadWorkerProcess, layout, number, self._shapes, dtype, self._page_elems, cpus[number - 1]
                )
                for number in range(1, 1 + workers)
            }
            self._processes = WorkerProcesses(makers, fd, self._ranks, PATIENCE_SECONDS)
        finally:
            os.close(fd)
        self.starts = ColdStarts()
        self.cold_start: ColdStart | None = None
        self.profile = OffloadProfile(0.0, 0.0)
        self.offloaded: OffloadedSegments | None = None
        """What the last step lent."""
        self._coming: dict[int, _Coming] = {}  # of the step, by the address of the count of layers that have arrived
        self._chosen: dict[int, tuple[int, ColdStart]] = {}  # of these the tokens, and the way to begin
        self._images: list[Any] = []  # of what is lent
        self._step, self._began = 0, 0.0
        self._per_token = 0.0  # seconds of a step with prompts, with adapters that were there
        self._per_elem = _UNKNOWN_PACE
        self._is_lost = False

    def use_adapters(self, adapters: OffloadAdapters) -> None:
        """Lend of these adapters from now on."""
        adapters.share(self._memory)
        self.adapters = adapters

    def join(self) -> None:
        """Wait until the offload workers are ready, and take their profile."""
        try:
            self._processes.join()
            one, many = self.time_exchange(1, 1), self.time_exchange(_PROFILE_TOKENS, 1)
        except BaseException:
            self.close()
            raise
        elems = _PROFILE_RANK * (self._shapes[0] + self._shapes[2])
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
        """Run a step of which nothing is under way when `forward` returns."""
        self.begin_step(plan)
        try:
            return forward(plan)
        finally:
            self.end_step(plan)

    def begin_step(self, plan: StepPlan) -> None:
        """Before a step; what of it is lent is chosen by `begin`, once its segments are known."""
        coming = ((adapter.transfer, self.adapters.coming) for adapter in plan.adapters if adapter.transfer is not None)
        self._coming = {transfer.address: known[transfer] for transfer, known in coming if transfer in known}
        self._began = time.monotonic()
        if self._coming:
            self.offloaded, self._chosen = None, {}

    def end_step(self, plan: StepPlan) -> None:
        """After a step, when it is computed."""
        if self._coming:
            self._end()
        elif plan.bucket is None:
            self._per_token = (time.monotonic() - self._began) / plan.num_tokens

    def begin(self, segments: Segments) -> OffloadedSegments | None:
        """See `Offloading.begin`."""
        now, entries, offsets, row = time.monotonic(), [], [], [0]
        for address, coming in self._coming.items():
            if layers_at(address) == coming.layout.num_layers:
                continue
            own = [index for index, ready in enumerate(segments.ready) if ready == address]
            lengths = [segments.end[index] - segments.begin[index] for index in own]
            fits = row[-1] + sum(lengths) <= self._most_rows and len(entries) + len(own) <= MAX_OFFLOADED
            offset = self._offset_to_offload(address, coming, sum(lengths), now, fits)
            if offset is not None:
                entries += own
                offsets += [offset] * len(own)
                row += [*itertools.accumulate(lengths, initial=row[-1])][1:]
        return self._begin_offload(segments, entries, offsets, row) if entries else None

    def _offset_to_offload(self, address: int, coming: _Coming, tokens: int, now: float, fits: bool) -> int | None:
        """Return where the offload workers find an adapter if its tokens are theirs; None if its layers are waited
        for.
        """
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
        """A step does not wait for all layers: requests that are to wait are none of it (`LoadPolicy`)."""
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
        """Seconds of the adapter's link that the products of all layers take."""
        return 0.0

    def _cost(self, coming: _Coming) -> CpuLoraCost:
        return self.profile.cost(coming.layout, 4 * coming.layout.num_layers, self._workers)

    def _begin_offload(
        self, segments: Segments, entries: Sequence[int], offsets: Sequence[int], row: Sequence[int]
    ) -> OffloadedSegments | None:
        comings = [self._coming[segments.ready[index]] for index in entries]
        share = shares(row[-1], max(int(self._cost(coming).tokens_each) for coming in comings), self._workers)
        # from the image, with its pages in order, in place of the arena's
        rows = [replace(part, pages=range(len(part.pages))) for part in map(segments.rows.__getitem__, entries)]
        try:
            self._begin(rows, row, share, offsets)
        except ExecutorLost as error:
            self._give_up(error)
            return None
        self._images = [coming.image.data for coming in comings]  # which stay, whatever becomes of the reads
        self.offloaded = OffloadedSegments(
            self._ranks,
            entries,
            row,
            share,
            [coming.image.stream.address for coming in comings],
            self._memory.exchanges,
        )
        return self.offloaded

    def _begin(
        self, rows: Sequence[AdapterRows], row: Sequence[int], share: Sequence[int], offsets: Sequence[int]
    ) -> None:
        """Have the offload workers wait for exchanges. Raises ExecutorLost."""
        self._step += 1
        self._ranks.begin(self._step)
        self._processes.send("serve", self._step, rows, row, share, offsets)

    def _finish(self) -> None:
        """Have the offload workers leave the step. Raises ExecutorLost, or their error."""
        self._ranks.fail(self._step)
        self._processes.answers()

    def _end(self) -> None:
        """After a step with adapters on their way."""
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
        """Prices of the ways to have begun, by the pace of the copy as it is known after the step."""
        whole = coming.arrival(arrived, now, self._per_elem)
        arrival = Arrival(whole.layers, whole.first, whole.first * whole.layers)
        return self._price(arrival, coming, tokens)

    def _give_up(self, error: Exception) -> None:
        """Lend nothing any more: prompts wait for their adapters."""
        if not self._is_lost:
            self._is_lost = True
            self._ranks.lose()
            logger.error("no prompt is offloaded any more until the next start: %s", error)

    def time_exchange(
        self, tokens: int, workers: int, rank: int = _PROFILE_RANK, rounds: int = _PROFILE_ROUNDS
    ) -> float:
        """Median seconds to hand x of the query projection over, and to get the products of an adapter of zeros.

        workers: offload workers among which the tokens are split.
        """
        hidden, q = self._shapes[0], self._shapes[2]
        pages = range(-(-rank * (hidden + q) // self._page_elems))
        image = self.adapters.dma.buffers.take((len(pages), self._page_elems), self._dtype).zero_()
        offset = self._memory.offset(image)
        if offset is None:
            raise MemoryError(f"host_cache_bytes leaves no room for {image.nbytes} bytes of a profile; raise it")
        others = (-1,) * (len(MODULES) - 1)
        rows = AdapterRows(pages, rank, 1.0, hidden + q, (0, *others), (hidden, *others), (0,))
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
        """Hand rows of the query projection's input over, of one lent segment, and wait for the products."""
        post_exchange(self._ranks, self._memory.exchanges, x, self._dtype)
        self._ranks.meet()

    def close(self) -> None:
        self._processes.close()
        self._memory.close()


def shares(rows: int, each: int, workers: int) -> list[int]:
    """Where each offload worker's rows begin, and the last's end: so many have rows that none has more than `each`, if
    there are as many, and all of these have as many.
    """
    used = max(1, min(workers, -(-rows // each)))
    return [rows * min(index, used) // used for index in range(workers + 1)]


def offload_worker_cpus(workers: int) -> list[int | None]:
    """Processors for the offload workers, the last that the process may use, all but the first; in turns where they
    are too few.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [None] * workers
    cpus = sorted(os.sched_getaffinity(0))
    own = cpus[max(1, len(cpus) - workers) :]
    return [own[index % len(own)] if own else None for index in range(workers)]


def layers_at(address: int) -> int:
    """An adapter's layers that have arrived, by the address of their count."""
    return ctypes.c_int32.from_address(address).value
