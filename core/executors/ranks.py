"""An executor of several ranks: processes of this machine that compute each layer together (tensor parallel).

The first rank is this process. It draws the tokens, and reads and moves what lies in the arenas, which it sees all of;
the other ranks compute their shares of the same steps. What clocks decide is decided here, or by all ranks together: a
step is done, and a shadow made, when it is on every rank, and a row is void that is void on any.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, TypeVar

import torch

from ...memory.adapters.adapter import Adapter
from ...memory.files.format import AdapterManifest
from ...memory.host.image import HostImage, LayerStream
from ...memory.pages.adapter_layout import AdapterLayout
from ...memory.pages.arena import Arena
from ...memory.pages.layout import MODULES, ModuleDims, PageLayout
from ...memory.transfers.dma import open_dma
from ...memory.transfers.host_copies import HostCopies, HostTransfer
from ...memory.transfers.transfer import ExecutorLost, Transfer, check_pages
from ...ops import native_library
from ...ops.ranks import Ranks, RanksLost, StepGivenUp
from ..config import EngineConfig
from ..model.config import ModelConfig, UnsupportedModel
from ..model.shadow import ShadowWeights
from ..model.shard import Shard
from ..model.weights import num_weights
from ..requests.plan_wire import adapter_to_wire, plan_to_wire
from ..requests.types import StepPlan, StepResult
from .adapters import ModelAdapters
from .base import ModelExecutor
from .cpu import CpuExecutor, cpu_pages, cpu_threads
from .rank_memory import NUM_COUNTS, MemoryLayout, RankMemory, RankSeat
from .swaps import PageSwaps

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that ranks wait for each other before they are lost: many times a step of any model.
PATIENCE_SECONDS = 60.0

#: Seconds that the other ranks may take to end.
STOP_SECONDS = 5.0

_LOOK_SECONDS = 0.2

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
        layout = MemoryLayout(
            size, config.max_num_batched_tokens * (first.whole.hidden_size + _ROW_ROOM), self.num_pages,
            self.num_pages * one.page_bytes, patience,
        )  # fmt: skip
        fd = RankMemory.create(layout)
        try:
            memory = RankMemory(fd, layout)
            seat = RankSeat(first.shard, memory)
            self._followers = Followers(config, layout, fd, seat.ranks)
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
        self.adapters = RankAdapters(first.whole, self.first.config, arenas, memory)
        self.swaps = RankSwaps(arenas)
        self._known: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self._gone: list[int] = []
        self.shadow = RankShadow(self.first.shadow, self._followers, self._entry)
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
        self._introduce([*plan.adapters, *([] if plan.merged is None else [plan.merged])])
        self._steps = number = self._steps + 1
        self._ranks.begin(number)
        step = "step", number, plan_to_wire(plan, draws=False), coming
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

    def _introduce(self, adapters: Sequence[Adapter]) -> None:
        """Tell the other ranks of adapters that they don't know, and of those that are gone."""
        new = {adapter.version: adapter.manifest.parts for adapter in adapters if adapter not in self._known}
        if not new and not self._gone:
            return
        gone, self._gone = self._gone, []
        self._followers.send("know", new, gone)
        for adapter in adapters:
            if adapter not in self._known:
                self._known.add(adapter)
                weakref.finalize(adapter, self._gone.append, adapter.version).atexit = False

    def _entry(self, adapter: Adapter) -> dict[str, Any]:
        self._introduce([adapter])
        return adapter_to_wire(adapter)


class Followers:
    """The processes of all ranks but the first. Messages are `rank.Follower`'s methods."""

    def __init__(self, config: EngineConfig, layout: MemoryLayout, memory_fd: int, ranks: Ranks) -> None:
        self._size, self._seconds, self._ranks = layout.size, layout.seconds, ranks
        self._processes: list[Popen[bytes]] = []
        self._links: list[Connection] = []
        self._on_lost: Callable[[ExecutorLost], None] = lambda error: None
        self._is_closed = False
        command = [sys.executable, "-m", f"{__package__}.rank"]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}
        try:
            for rank in range(1, layout.size):
                here, there = socket.socketpair()
                here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(layout.seconds) + 1, 0))
                with there:
                    self._links.append(Connection(here.detach()))
                    fds = there.fileno(), memory_fd
                    self._processes.append(Popen([*command, *map(str, fds)], stdin=PIPE, pass_fds=fds, env=path))
                with suppress(OSError):  # of a process that has ended already, of which `join` says why
                    self._links[-1].send((config, Shard(rank, layout.size), layout))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def join(self) -> list[int]:
        """Wait until every rank has read its weights, and watch it from then on; the bytes of each."""
        found = []
        for rank, (link, process) in enumerate(zip(self._links, self._processes, strict=True), 1):
            while not link.poll(_LOOK_SECONDS) and process.poll() is None:
                pass
            try:
                num_bytes, reason = link.recv()
            except (EOFError, OSError):
                num_bytes, reason = None, f"its process ended ({self._end_of(rank)}); its messages are above"
            if reason is not None:
                raise RuntimeError(f"rank {rank} of {self._size} could not join: {reason}")
            found.append(num_bytes)
        for rank in range(1, self._size):
            threading.Thread(target=self._watch, args=[rank], name=f"chorus-rank-{rank}", daemon=True).start()
        return found

    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None:
        self._on_lost = on_lost

    def send(self, name: str, *arguments: Any) -> None:
        """Send all a message. Raises ExecutorLost."""
        message = pickle.dumps((name, *arguments))
        for rank, link in enumerate(self._links, 1):
            try:
                link.send_bytes(message)
            except OSError as error:
                raise self._lost(rank) from error

    def beside(self, work: Callable[[], T], name: str, *arguments: Any) -> tuple[T, list[Any]]:
        """Do the first rank's work while the others do what a message says; its result, and their answers. Raises its
        error or another rank's, after all have answered, or ExecutorLost.
        """
        self.send(name, *arguments)
        try:
            result = work()
        except Exception as error:
            self._answers(error)
            raise
        return result, self._answers()

    def _answers(self, failure: Exception | None = None) -> list[Any]:
        """All answers to a message. Raises ExecutorLost, or an error of another rank, unless one of the first rank's
        own, `failure`, explains it.
        """
        seconds = STOP_SECONDS if isinstance(failure, RanksLost) else self._seconds
        deadline, found, errors = time.monotonic() + seconds, [], []
        for rank, link in enumerate(self._links, 1):
            try:
                if not link.poll(max(0.0, deadline - time.monotonic())):
                    self._ranks.lose()
                    raise ExecutorLost(f"rank {rank} of {self._size} kept the others waiting for {self._seconds:g} s")
                value, error = link.recv()
            except (EOFError, OSError) as error:
                raise self._lost(rank) from error
            found.append(value)
            if isinstance(error, Exception):
                errors.append(error)
            elif error is not None:
                errors.append(RuntimeError(f"rank {rank} of {self._size}: {error}"))
        if isinstance(failure, RanksLost):
            raise ExecutorLost(str(failure)) from failure
        if errors and (failure is None or isinstance(failure, StepGivenUp)):
            raise errors[0]
        return found

    def close(self) -> None:
        """End all processes, by force where they don't end by themselves."""
        self._is_closed = True
        self._ranks.lose()
        for link, process in zip(self._links, self._processes, strict=False):
            link.close()
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int) -> None:
        self._processes[rank - 1].wait()
        if not self._is_closed:
            self._on_lost(self._lost(rank))

    def _lost(self, rank: int) -> ExecutorLost:
        self._ranks.lose()
        return ExecutorLost(f"rank {rank} of {self._size} has ended ({self._end_of(rank)})")

    def _end_of(self, rank: int) -> str:
        try:
            status = self._processes[rank - 1].wait(STOP_SECONDS)
        except TimeoutExpired:
            return "it does not answer any more"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class RankAdapters:
    """Reads adapters once and copies every rank's share into its arena. A share has the same layout on all ranks.

    Of a projection with shares of its outputs A is whole on every rank and B a share; with shares of its inputs A is a
    share and B whole. An image's data are the shares of all ranks.
    """

    def __init__(self, whole: ModelConfig, share: ModelConfig, arenas: Sequence[Arena], memory: RankMemory) -> None:
        """whole, share: shapes of the model, and of a rank's share of it."""
        arena = arenas[0]
        self._dtype, self._page = arena.pages.dtype, arena.layout
        self._whole = ModelAdapters(whole, arena, self._dtype)
        self._share = ModelAdapters(share, arena, self._dtype)
        self._buffers = self._share.dma.buffers
        self._copies = [HostCopies(arena.pages) for arena in arenas]
        self._num_pages = arena.num_pages
        self._counts = memory.counts
        self._free_counts = list(range(NUM_COUNTS))
        self._used_counts: weakref.WeakKeyDictionary[Transfer, int] = weakref.WeakKeyDictionary()
        size = len(arenas)
        self._parts = [
            {name: Shard(rank, size).of_module(name, whole) for name in MODULES} for rank in range(size)
        ]  # fmt: skip
        self._dims = whole.module_dims, share.module_dims

    def inspect(self, path: Path, roots: Sequence[Path] = ()) -> AdapterManifest:
        return self._whole.inspect(path, roots)

    def layout(self, manifest: AdapterManifest) -> AdapterLayout:
        """The layout of a share."""
        return self._share.layout(manifest)

    def read(self, manifest: AdapterManifest, layout: AdapterLayout, image: HostImage) -> None:
        """Read the file once; a layer's shares are cut from it as soon as it is there."""
        whole_layout, whole = self._whole.layout(manifest), HostImage()
        shares = [self._take(layout.num_pages) for _ in self._copies]
        image.data = shares
        done = 0

        def cut() -> None:
            nonlocal done
            ready = whole.stream.num_ready
            for layer in range(done, ready):
                for share, parts in zip(shares, self._parts, strict=True):
                    _cut(manifest, layer, (whole_layout, whole.data), (layout, share), parts, self._dims)
            done = ready
            image.publish(ready)

        whole.follow(cut)
        self._whole.read(manifest, whole_layout, whole)

    def place(self, image: HostImage, layout: AdapterLayout, pages: list[int]) -> Transfer | None:
        check_pages(pages, layout.num_pages, self._num_pages)
        if not self._free_counts:
            raise RuntimeError(f"{NUM_COUNTS} adapters are on their way into the arenas already")
        at = self._free_counts.pop()
        self._counts[at] = 0
        transfer = HostTransfer(self, image, layout, pages, LayerStream(self._counts[at : at + 1]))
        self._used_counts[transfer] = at
        weakref.finalize(transfer, self._free_counts.append, at).atexit = False
        return None if transfer.is_done() else transfer

    def save(self, layout: AdapterLayout, pages: list[int]) -> HostImage:
        image = HostImage()
        image.data = [self._take(len(pages)) for _ in self._copies]
        for copies, share in zip(self._copies, image.data, strict=True):
            copies.copy_out(pages, share)
        image.publish(layout.num_layers)
        return image

    def copy_in(self, image: Sequence[torch.Tensor], ranges: Sequence[tuple[int, int]], pages: Sequence[int]) -> None:
        for copies, share in zip(self._copies, image, strict=True):
            copies.copy_in(share, ranges, pages)

    def count_of(self, transfer: Transfer) -> int:
        """Number of the count, in the ranks' memory, of the layers that have arrived."""
        return self._used_counts[transfer]

    def _take(self, num_pages: int) -> torch.Tensor:
        return self._buffers.take((num_pages, self._page.page_elems), self._dtype)


def _cut(
    manifest: AdapterManifest,
    layer: int,
    whole: tuple[AdapterLayout, torch.Tensor],
    share: tuple[AdapterLayout, torch.Tensor],
    parts: Mapping[str, tuple[slice, slice]],
    dims: tuple[ModuleDims, ModuleDims],
) -> None:
    """Copy a rank's part of a layer. whole, share: layout and elements; parts: inputs and outputs of each projection
    that the rank has; dims: of the whole projections and of the shares.
    """
    places = zip(manifest.parts, whole[0].parts, share[0].parts, strict=True)
    for part, from_place, to_place in places:
        if from_place.first_elem[layer] < 0:
            continue
        source, target = (
            data.view(-1)[place.first_elem[layer] :][: place.layer_elems].view(part.rank, -1)
            for place, (_, data) in ((from_place, whole), (to_place, share))
        )
        for name in part.targets:
            m = MODULES.index(name)
            (d_in, d_out), (to_in, to_out) = dims[0][name], dims[1][name]
            inputs, outputs = parts[name]
            a, b = from_place.slabs.a_offset[m], from_place.slabs.b_offset[m]
            to_a, to_b = to_place.slabs.a_offset[m], to_place.slabs.b_offset[m]
            target[:, to_a : to_a + to_in] = source[:, a : a + d_in][:, inputs]
            target[:, to_b : to_b + to_out] = source[:, b : b + d_out][:, outputs]


class RankSwaps:
    """Copies pages of all arenas. An image is those of all ranks; a CPU's copies are complete when they have begun."""

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

    def __init__(self, first: ShadowWeights, followers: Followers, entry: Callable[[Adapter], dict[str, Any]]) -> None:
        """entry: an adapter, of which the followers know, as they are told of it."""
        self._first, self._followers, self._entry = first, followers, entry

    def sizes(self, adapter: Adapter) -> list[int]:
        return self._first.sizes(adapter)

    def wished_runs(self, adapter: Adapter) -> list[range] | None:
        return self._first.wished_runs(adapter)

    def begin(self, adapter: Adapter, runs: Sequence[range]) -> None:
        entry = self._entry(adapter)
        self._followers.beside(lambda: self._first.begin(adapter, runs), "begin_shadow", entry, list(runs))

    def advance(self, max_seconds: float) -> bool:
        """Have every rank do some of the work at the same time; see `ShadowBackend.advance`."""
        is_made, others = self._followers.beside(
            lambda: self._first.advance(max_seconds), "advance_shadow", max_seconds
        )  # fmt: skip
        return is_made and all(others)

    @property
    def share_made(self) -> float:
        return self._first.share_made

    def drop(self) -> None:
        self._followers.beside(self._first.drop, "drop_shadow")
