"""An executor of several ranks: processes of this machine that compute each layer together (tensor parallel).

The first rank is this process. It draws the tokens, and reads and moves what lies in the arenas, which it sees all of;
the other ranks compute their shares of the same steps. What clocks decide is decided here, or by all ranks together: a
step is done, and a shadow made, when it is on every rank, and a row is void that is void on any.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...memory.adapters.adapter import Adapter
from ...memory.pages.arena import Arena
from ...memory.pages.layout import PageLayout
from ...memory.transfers.dma import open_dma
from ...memory.transfers.transfer import ExecutorLost
from ...ops import native_library
from ..config import EngineConfig
from ..model.config import UnsupportedModel
from ..model.sampler import needs_logits
from ..model.shadow import ShadowWeights
from ..model.shard import Shard
from ..model.weights import num_weights
from ..requests.plan_wire import adapter_to_wire, plan_to_wire
from ..requests.types import StepPlan, StepResult
from .base import ModelExecutor
from .cpu import CpuExecutor, cpu_pages, cpu_threads
from .followers import Followers
from .rank import CpuFollower
from .rank_adapters import ArenaAdapters
from .rank_memory import MemoryLayout, RankMemory, RankSeat
from .swaps import PageSwaps

logger = logging.getLogger(__name__)

#: Seconds that ranks wait for each other before they are lost: many times a step of any model.
PATIENCE_SECONDS = 60.0

#: Values beside a token's hidden state, to which the native decoder rounds up rows.
_ROW_ROOM = 32


class RanksExecutor:
    """Runs steps on `config.tensor_parallel_size` ranks, of which the first is a `CpuExecutor` of this process."""

    start = None  # as of the CPU's executor

    def __init__(self, config: EngineConfig, patience: float = PATIENCE_SECONDS) -> None:
        """Raises UnsupportedModel, and RuntimeError, which names it, when a rank can't join."""
        size = config.tensor_parallel_size
        if reason := native_library.why_unavailable(torch.float32):
            raise UnsupportedModel(f"tensor_parallel_size is {size}, and ranks add up by the native library: {reason}")
        shapes = [ModelExecutor(config, Shard(rank, size)) for rank in range(size)]
        first = shapes[0]
        one = first.layout
        self.model = first.model
        self.layout = PageLayout(one.num_layers, size * one.kv_heads, one.head_dim, one.block_tokens, one.itemsize)
        weights = sum(num_weights(each.whole, each.shard) for each in shapes) * one.itemsize
        self.num_pages = cpu_pages(config, first, self.layout, weights)
        floats = max(config.max_num_batched_tokens * (first.whole.hidden_size + _ROW_ROOM), first.whole.vocab_size)
        layout = MemoryLayout(size, floats, self.num_pages, self.num_pages * one.page_bytes, patience)
        fd = RankMemory.create(layout)
        try:
            memory = RankMemory(fd, layout)
            seat = RankSeat(first.shard, memory)
            makers = {
                f"rank {rank} of {size}": partial(CpuFollower, config, Shard(rank, size), layout)
                for rank in range(1, size)
            }
            self._followers = Followers(makers, fd, seat.ranks, patience)
        finally:
            os.close(fd)
        self._ranks = seat.ranks
        self._steps = 0
        try:
            self.first = CpuExecutor(config, seat)
            weight_bytes = [self.first.weight_bytes, *self._followers.join()]
        except BaseException:
            self._followers.close()
            raise
        dtype = self.first.arena.pages.dtype
        arenas = [self.first.arena]
        arenas += [Arena(one, self.num_pages, dtype, "cpu", memory.arena(rank, dtype)) for rank in range(1, size)]
        self.adapters = ArenaAdapters(first.whole, self.first.config, arenas, memory)
        self.swaps = RankSwaps(arenas)
        self._known = KnownAdapters(self._followers)
        self.shadow = RankShadow(self.first.shadow, self._followers.beside, self._known.entry)
        mib = " + ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in weight_bytes)
        logger.info(
            "%d ranks of %d threads: weights of %s MiB, KV and adapters of %.1f MiB each", size, cpu_threads(config),
            mib, layout.arena_bytes / 2**20,
        )  # fmt: skip

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`. A step that fails on one rank is given up by all of them."""
        coming = {
            slot: self.adapters.count_of(adapter.transfer)
            for slot, adapter in enumerate(plan.adapters)
            if adapter.transfer is not None
        }
        self._known.introduce_all(plan)
        self._steps = number = self._steps + 1
        self._ranks.begin(number)
        kept = [index for index, row in enumerate(plan.rows) if needs_logits(row)]
        step = "step", number, plan_to_wire(plan, draws=False), kept, coming
        result, late = self._followers.beside(partial(self._run, plan, number), *step)
        for request_id in {name for names in late for name in names}:
            result.retract(request_id)
        return result

    def _run(self, plan: StepPlan, number: int) -> StepResult:
        try:
            return self.first.execute(plan)
        except Exception:
            self._ranks.fail(number)
            raise

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        """Have `on_lost` called, from any thread, when a rank ends by itself."""
        self._followers.watch(on_lost)

    @property
    def pids(self) -> list[int]:
        """Processes of the other ranks."""
        return self._followers.pids

    def close(self) -> None:
        self._followers.close()
        self.first.close()


class KnownAdapters:
    """The adapters that the other ranks know."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._known: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self._gone: list[int] = []

    def introduce_all(self, plan: StepPlan) -> None:
        """See `introduce`, of a plan's adapters."""
        self.introduce([*plan.adapters, *([] if plan.merged is None else [plan.merged])])

    def introduce(self, adapters: Sequence[Adapter]) -> None:
        """Tell the other ranks of new adapters, and of adapters that are gone."""
        new = {adapter.version: adapter.manifest.parts for adapter in adapters if adapter not in self._known}
        if not new and not self._gone:
            return
        gone, self._gone = self._gone, []
        self._followers.send("know", new, gone)
        for adapter in adapters:
            if adapter not in self._known:
                self._known.add(adapter)
                weakref.finalize(adapter, self._gone.append, adapter.version).atexit = False

    def entry(self, adapter: Adapter) -> dict[str, Any]:
        """An adapter as the other ranks receive it; they know it from now on."""
        self.introduce([adapter])
        return adapter_to_wire(adapter)


class RankSwaps:
    """Copies pages of all arenas. An image is all ranks' pages; a CPU's copies are complete at once."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._swaps = [PageSwaps(arena, open_dma(arena.pages, 0)) for arena in arenas]
        self.page_seconds = sum(swaps.page_seconds for swaps in self._swaps)

    def copy_out(self, pages: Sequence[int]) -> tuple[list[torch.Tensor], None]:
        return [swaps.copy_out(pages)[0] for swaps in self._swaps], None

    def copy_in(self, image: Sequence[torch.Tensor], skip: int, pages: Sequence[int]) -> None:
        for swaps, share in zip(self._swaps, image, strict=True):
            swaps.copy_in(share, skip, pages)

    def wait(self, timeout: float) -> None:
        self._swaps[0].wait(timeout)


class RankShadow:
    """The shadow of an adapter on all ranks, each of which makes its share of every matrix.

    An adapter is refused where any rank's share of a row would grow too much.
    """

    def __init__(
        self, first: ShadowWeights, beside: Callable[..., tuple[Any, list[Any]]],
        entry: Callable[[Adapter], dict[str, Any]],
    ) -> None:  # fmt: skip
        """beside: see `Followers.beside`. entry: an adapter, which the followers know, as they receive it."""
        self._first, self._beside, self._entry = first, beside, entry

    def sizes(self, adapter: Adapter) -> list[int]:
        return self._first.sizes(adapter)

    def wished_runs(self, adapter: Adapter) -> list[range] | None:
        return self._first.wished_runs(adapter)

    def begin(self, adapter: Adapter, runs: Sequence[range]) -> None:
        entry = self._entry(adapter)
        self._beside(lambda: self._first.begin(adapter, runs), "begin_shadow", entry, list(runs))

    def advance(self, max_seconds: float) -> bool:
        """Have every rank do some of the work at the same time; see `ShadowBackend.advance`."""
        is_made, others = self._beside(
            lambda: self._first.advance(max_seconds), "advance_shadow", max_seconds
        )  # fmt: skip
        return is_made and all(others)

    @property
    def share_made(self) -> float:
        return self._first.share_made

    def drop(self) -> None:
        self._beside(self._first.drop, "drop_shadow")
