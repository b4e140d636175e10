"""An executor with several TP ranks: processes of this machine that compute each layer together (tensor parallelism).

The first rank is this process, and it samples the tokens. Decisions that depend on clocks are made here, or by all
ranks together. A step is done, and merged weights are made, when every rank has done so; an entry that is void on any
rank is void. `RanksExecutorBase` is the common part of ranks on processors and on GPUs (`cuda_ranks`). On processors
the first rank also fills all arenas, which it shares; the other ranks compute their shares of the same steps.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ...memory.adapters.adapter import Adapter
from ...memory.host.buffers import HostBuffers
from ...memory.pages.arena import Arena
from ...memory.pages.projections import Role
from ...memory.transfers.transfer import ExecutorLost
from ...ops.library import native_library
from ..config import EngineConfig
from ..model.program.native_decoder import why_unsupported
from ..model.sampler import asking_rows
from ..model.specs.config import ModelConfig, UnsupportedModel
from ..model.weights.shadow import ShadowWeights
from ..model.weights.shard import Shard
from ..requests.plan_wire import adapter_to_wire, plan_to_wire
from ..requests.types import StepPlan, StepResult
from .base import ExecutorBase, ModelExecutor
from .cpu import CpuExecutor
from .cpu_setup import cpu_pages, weight_bytes
from .rank import CpuRankContext, CpuTpWorker, arena_bytes
from .rank_adapters import ArenaCopies, RankAdapters, RankBuffers
from .shared_memory import MemoryLayout, SharedMemory
from .swaps import PageSwaps
from .worker_processes import Losable, WorkerProcesses

if TYPE_CHECKING:
    from .cuda import CudaExecutor

logger = logging.getLogger(__name__)

First = TypeVar("First", bound="CpuExecutor | CudaExecutor")

#: Seconds that ranks wait for each other before they are lost: many times the duration of any step.
PATIENCE_SECONDS = 60.0

#: Extra values per token, because the native decoder rounds rows up.
_ROW_ROOM = 32

_MIB = 1 << 20


class RanksExecutorBase(ExecutorBase, Generic[First]):
    """One executor made of several ranks; `first` computes the first rank's share in this process."""

    first: First
    num_pages: int

    def __init__(
        self,
        config: EngineConfig,
        patience: float,
        make_shapes: Callable[[EngineConfig, Shard], ModelExecutor] = ModelExecutor,
    ) -> None:
        """patience: seconds that ranks wait for each other. make_shapes: of shapes and defaults as `first` has.

        Raises UnsupportedModel.
        """
        super().__init__()
        self._config, self._patience, self._size = config, patience, config.tensor_parallel_size
        self.shapes = make_shapes(config, Shard(0, self._size))
        """Shapes of the first rank's share."""
        self.model, one = self.shapes.model, self.shapes.layout
        self.layout = one.of_ranks(self._size)
        """Of a page of all ranks together."""

    def _begin(self, make: Callable[[Shard, int], Any], memory_fd: int, ranks: Losable) -> None:
        """Start the other ranks. make: called in each of them, see `WorkerProcesses`."""
        size = self._size
        makers = {f"rank {rank} of {size}": partial(make, Shard(rank, size)) for rank in range(1, size)}
        self._processes = WorkerProcesses(makers, memory_fd, ranks, self._patience)

    def _join(self) -> None:
        """Wait for the other ranks, after `first` has loaded its share. Raises RuntimeError, naming the rank that can't
        join.
        """
        weights = [self.first.weight_bytes, *self._processes.join()]
        if self.shapes.quantiser is not None:
            each = " + ".join(f"{num_bytes / _MIB:.2f}" for num_bytes in weights)
            logger.info("%d ranks: weights of %s MiB, quantised to %s", self._size, each, self._config.quantization)
            return
        by_formula = weights_of_rank(self.shapes.whole, self._size) * self.layout.itemsize
        logger.info(
            "%d ranks: weights of %s MiB (V·h + h + 2·L·h + P/N + R + V·h/N of untied embeddings, with P weights of "
            "projections and R of routers: %.2f)",
            self._size,
            " + ".join(f"{each / _MIB:.2f}" for each in weights),
            by_formula / _MIB,
        )

    def _serve(self, beside: Callable[..., tuple[Any, list[Any]]]) -> None:
        """Serve plans and merged weights from now on. beside: see `WorkerProcesses.beside`."""
        self._known = KnownAdapters(self._processes)
        self.eager_steps = self.first.eager_steps
        self.shadow = RankShadow(self.first.shadow, beside, self._known.entry)
        page_bytes = self.shapes.layout.page_bytes
        logger.info("KV and adapters of %.1f MiB on each rank", self.num_pages * page_bytes / _MIB)

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """Register `on_lost`, which is called, from any thread, when a rank ends by itself."""
        self._processes.watch(on_lost)

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return self._processes.pids

    def close(self) -> None:
        self._processes.close()
        self.first.close()


def weights_of_rank(whole: ModelConfig, size: int) -> int:
    """Number of weights of each of `size` ranks, by the formula of docs/explanation/memory.md.

    It ignores biases, norms of heads, more than two norms of a layer, the small weights of recurrent mixers, and that
    several ranks may have the same rows of a projection.
    """
    hidden = whole.hidden_size
    embeddings = whole.vocab_size * hidden
    head = 0 if whole.tie_word_embeddings else embeddings // size
    every = chain(
        whole.stored_projections, (each for each in whole.projections.model if each.product == Role.PER_LAYER)
    )
    spec = whole.per_layer_embeddings
    table = 0 if spec is None else spec.vocab * spec.size * whole.num_layers
    projections = sum(each.num_weights // (1 if each.is_replicated else size) for each in every)
    streams = 0 if whole.streams is None else whole.streams.num_weights(hidden, whole.num_layers)
    return embeddings + table + streams + head + hidden + whole.num_layers * 2 * hidden + projections


class RanksExecutor(RanksExecutorBase[CpuExecutor]):
    """Runs steps on `config.tensor_parallel_size` ranks; the first one is a `CpuExecutor` in this process."""

    start = None  # for the same reason as in `CpuExecutor`

    def __init__(self, config: EngineConfig, patience: float = PATIENCE_SECONDS) -> None:
        """Raises UnsupportedModel, and RuntimeError, which names the rank that can't join."""
        size = config.tensor_parallel_size
        if reason := native_library.why_unavailable(torch.float32):
            raise UnsupportedModel(f"tensor_parallel_size is {size}, and ranks need the native library: {reason}")
        super().__init__(config, patience)
        shapes, one = self.shapes, self.shapes.layout
        dtype = shapes.dtype
        native = config.cpu_kernels != "torch" and why_unsupported(shapes.config, dtype) is None
        weights = sum(weight_bytes(config, shapes, Shard(rank, size), dtype, native=native) for rank in range(size))
        self.num_pages = num_pages = cpu_pages(config, shapes, self.layout, weights)
        widest = max(shapes.whole.projections.summed)
        floats = max(config.max_num_batched_tokens * (widest + _ROW_ROOM), shapes.whole.vocab_size)
        layout = MemoryLayout(size, floats, CpuRankContext.COUNT_BYTES, size * arena_bytes(one, num_pages))
        fd = SharedMemory.create(layout)
        try:
            memory = SharedMemory(fd, layout)
            rank_context = CpuRankContext(shapes.shard, memory, one, num_pages, patience)
            self._ranks, self._steps = rank_context.ranks, 0
            make = partial(CpuTpWorker, config, layout, page=one, num_pages=num_pages, seconds=patience)
            self._begin(make, fd, rank_context.ranks)
        finally:
            os.close(fd)
        try:
            self.first = CpuExecutor(config, rank_context)
            self._join()
        except BaseException:
            self._processes.close()
            raise
        dtype, others = self.first.arena.pages.dtype, range(1, size)
        arenas = [self.first.arena]
        arenas += [Arena(one, num_pages, dtype, "cpu", rank_context.arena(rank, dtype)) for rank in others]
        self._copies = ArenaCopies(arenas, rank_context.counts)
        buffers = RankBuffers(HostBuffers(), size)
        self.adapters = RankAdapters(
            shapes.whole,
            shapes.config,
            arena=arenas[0],
            copies=self._copies,
            buffers=buffers,
            size=size,
            base=shapes.base_weights,
        )
        self.swaps = PageSwaps(arenas[0], self.adapters.dma)
        self._serve(self._processes.beside)

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`. If a step fails on one rank, all ranks abort it."""
        coming = {
            lora_index: self._copies.count_of(adapter.transfer)
            for lora_index, adapter in enumerate(plan.adapters)
            if adapter.transfer is not None
        }
        self._known.introduce_all(plan)
        self._steps = number = self._steps + 1
        self._ranks.begin(number)
        kept = asking_rows(plan, plan.rows_with_logits())
        step = "step", number, plan_to_wire(plan, samples=False), kept, coming
        result, late = self._processes.beside(partial(self._run, plan, number), *step)
        for request_id in {name for names in late for name in names}:
            result.retract(request_id)
        return result

    def _run(self, plan: StepPlan, number: int) -> StepResult:
        try:
            return self.first.execute(plan)
        except Exception:
            self._ranks.fail(number)
            raise


class KnownAdapters:
    """The adapters that the other ranks know."""

    def __init__(self, processes: WorkerProcesses) -> None:
        self._processes = processes
        self._known: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self._gone: list[int] = []

    def introduce_all(self, plan: StepPlan) -> None:
        """Call `introduce` for a plan's adapters."""
        self.introduce([*plan.adapters, *([] if plan.merged is None else [plan.merged])])

    def introduce(self, adapters: Sequence[Adapter]) -> None:
        """Tell the other ranks about new adapters, and about adapters that are gone."""
        manifests = {adapter.version: adapter.manifest for adapter in adapters if adapter not in self._known}
        new = {version: (manifest.parts, manifest.vectors) for version, manifest in manifests.items()}
        if not new and not self._gone:
            return
        gone, self._gone = self._gone, []
        self._processes.send("know", new, gone)
        for adapter in adapters:
            if adapter not in self._known:
                self._known.add(adapter)
                weakref.finalize(adapter, self._gone.append, adapter.version).atexit = False

    def entry(self, adapter: Adapter) -> dict[str, Any]:
        """Return an adapter in the other ranks' form; they know it from now on."""
        self.introduce([adapter])
        return adapter_to_wire(adapter)


class RankShadow:
    """Merged weights on all ranks. Each rank makes its share of every matrix.

    An adapter is refused if it would change any rank's share of a row too much.
    """

    def __init__(
        self,
        first: ShadowWeights,
        beside: Callable[..., tuple[Any, list[Any]]],
        entry: Callable[[Adapter], dict[str, Any]],
    ) -> None:
        """beside: see `WorkerProcesses.beside`. entry: converts a known adapter to the form for TP workers."""
        self._first, self._beside, self._entry = first, beside, entry
        self.sizes, self.wished_runs = first.sizes, first.wished_runs

    def begin(self, adapter: Adapter, runs: Sequence[range]) -> None:
        entry = self._entry(adapter)
        self._beside(lambda: self._first.begin(adapter, runs), "begin_shadow", entry, list(runs))

    def advance(self, max_seconds: float) -> bool:
        """Make every rank do some of the work at the same time; see `ShadowBackend.advance`."""
        is_made, others = self._beside(lambda: self._first.advance(max_seconds), "advance_shadow", max_seconds)
        return is_made and all(others)

    @property
    def share_made(self) -> float:
        return self._first.share_made

    def drop(self) -> None:
        self._beside(self._first.drop, "drop_shadow")
