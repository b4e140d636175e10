"""A TP worker: a process that computes its share of every step that the first rank plans.

`worker_processes.WorkerProcesses` starts it as `python -m chorus.core.executors.rank LINK MEMORY`, with two open files:
a socket for commands and replies, and the memory that all ranks share. It ends with the first rank.

Tests: tests/core/executors/test_ranks.py
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ...memory.adapters.adapter import Adapter
from ...memory.files.manifest import AdapterManifest
from ...memory.pages.adapter_layout import AdapterLayout
from ...memory.pages.layout import PageLayout
from ...memory.transfers.host_copies import CompleteTransfer
from ..config import EngineConfig
from ..model.specs.config import ModelConfig
from ..model.weights.shadow import ShadowWeights
from ..model.weights.shard import Shard
from ..requests.plan_wire import plan_from_wire
from ..requests.types import CannotMerge
from .cpu import CpuExecutor
from .shared_memory import MemoryLayout, SharedMemory

#: Seconds between two checks of an adapter's progress.
LOOK_SECONDS = 2e-5

#: The most adapters that may be in transit into the arenas at once.
NUM_COUNTS = 4096

#: Messages without a reply.
_UNANSWERED = ("know", "place", "copy", "cancel", "pin")


class CountedTransfer(CompleteTransfer):
    """An adapter being copied into all arenas, as seen by a TP worker. count: `[1]` int32, its arrived layers."""

    def __init__(self, count: Any) -> None:
        self._count = count
        self.address = count.ctypes.data

    def wait_layer(self, layer: int, timeout: float = 0.0) -> bool:
        """Wait until `layer` has arrived; see `Transfer.wait_layer`."""
        deadline = time.monotonic() + timeout
        while 0 <= self._count[0] <= layer and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return self._count[0] > layer


class RankExecutor(Protocol):
    """An executor of a rank's share of the model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def layout(self) -> PageLayout: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def shadow(self) -> ShadowWeights: ...


class TpWorker:
    """Executes the first rank's messages; each method is a message, and its result the reply."""

    def __init__(self, executor: RankExecutor) -> None:
        self._executor = executor
        self._adapters: dict[int, Adapter] = {}  # by version
        self.joined = executor.weight_bytes

    def know(self, adapters: Mapping[int, Any], gone: list[int]) -> None:
        """Add the parts and vectors of new adapters, by version, and forget others."""
        model, page = self._executor.config, self._executor.layout
        for version in gone:
            self._adapters.pop(version, None)
        for version, (parts, vectors) in adapters.items():
            layout = AdapterLayout.build(parts, model.projections, page.page_elems, page.itemsize, vectors=vectors)
            manifest = AdapterManifest(Path(), parts, vectors=vectors)
            self._adapters[version] = Adapter(str(version), version, manifest, layout)

    def begin_shadow(self, adapter: Mapping[str, Any], runs: list[range]) -> None:
        self._executor.shadow.begin(self._find(adapter), runs)

    def advance_shadow(self, seconds: float) -> bool:
        return self._executor.shadow.advance(seconds)

    def drop_shadow(self) -> None:
        self._executor.shadow.drop()

    def _find(self, entry: Mapping[str, Any]) -> Adapter:
        """Find the adapter of an entry of a plan; its page list stays the same object while the pages stay the same."""
        adapter = self._adapters[entry["version"]]
        if adapter.pages != entry["pages"]:
            adapter.pages = list(entry["pages"])
        return adapter


class CpuRankContext:
    """The context of a TP rank on processors: its share of the model, all arenas, and the collectives."""

    COUNT_BYTES = 4 * NUM_COUNTS

    def __init__(self, shard: Shard, memory: SharedMemory, layout: PageLayout, num_pages: int, seconds: float) -> None:
        """layout: of a rank's pages. seconds: see `Ranks`."""
        self.shard, self.num_pages = shard, num_pages
        self._memory, self._layout = memory, layout
        self.ranks = memory.ranks(shard.rank, seconds)
        self.counts = memory.more(np.int32)
        """int32, the arrived layers of each adapter in transit into all arenas at once."""

    def pages(self, dtype: torch.dtype) -> torch.Tensor:
        """The rank's arena."""
        return self.arena(self.shard.rank, dtype)

    def arena(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a rank's arena, `[num_pages, page_elems]`."""
        offset = self._memory.layout.first_room + rank * arena_bytes(self._layout, self.num_pages)
        return self._memory.tensor(offset, (self.num_pages, self._layout.page_elems), dtype)


def arena_bytes(layout: PageLayout, num_pages: int) -> int:
    """Bytes from one rank's arena to the next, which begins at a system page."""
    return -(-num_pages * layout.page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class CpuTpWorker(TpWorker):
    """A TP worker on processors of this machine."""

    def __init__(
        self,
        config: EngineConfig,
        layout: MemoryLayout,
        shard: Shard,
        memory_fd: int,
        *,
        page: PageLayout,
        num_pages: int,
        seconds: float,
    ) -> None:
        """page: of a rank. seconds: see `Ranks`."""
        self._rank_context = CpuRankContext(shard, SharedMemory(memory_fd, layout), page, num_pages, seconds)
        self._cpu = CpuExecutor(config, self._rank_context)
        super().__init__(self._cpu)

    def step(self, number: int, plan: Mapping[str, Any], kept: Sequence[int], coming: Mapping[int, int]) -> list[str]:
        """Compute a step; see `CpuExecutor.compute`. coming: for each `lora_index` with an adapter in transit, its
        count.
        """
        ranks = self._rank_context.ranks
        ranks.begin(number)
        try:
            found = plan_from_wire(plan, self._find)
            for lora_index, adapter in enumerate(found.adapters):
                at = coming.get(lora_index)
                adapter.transfer = None if at is None else CountedTransfer(self._rank_context.counts[at : at + 1])
            return self._cpu.compute(found, kept)
        except BaseException:
            ranks.fail(number)
            raise


def serve_messages(link: Connection, memory_fd: int) -> int:
    """Join, then execute the first rank's messages until it sends None.

    The first message makes the worker, whose methods are the messages. The worker may have work to do while it waits
    for messages (`receive`), and methods that must not fail (`fatal`).
    """
    make = link.recv()
    try:
        worker = make(memory_fd)
    except Exception as error:
        link.send((None, f"{type(error).__name__}: {error}"))
        return 1
    link.send((worker.joined, None))
    receive = getattr(worker, "receive", Connection.recv)
    while (message := receive(link)) is not None:
        name, *arguments = message
        try:
            answer = getattr(worker, name)(*arguments), None
        except CannotMerge as error:
            answer = None, error
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        if name not in _UNANSWERED:
            link.send(answer)
        if answer[1] is not None and name in getattr(worker, "fatal", ()):
            return 1
    return 0


def _end_with_parent() -> None:
    """End this process when the first rank's process has ended in any way: then standard input, a pipe, closes."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main(link_fd: int, memory_fd: int) -> int:
    logging.basicConfig(level=logging.ERROR)  # the first rank logs the warnings that all ranks would log
    # sent by a terminal or to a whole service: the first rank drains first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="chorus-parent", daemon=True).start()
    torch.set_grad_enabled(False)
    try:
        with Connection(link_fd) as link:
            return serve_messages(link, memory_fd)
    except (EOFError, OSError):
        return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    logging.shutdown()
    os._exit(status)  # the interpreter's normal exit would wait for a device that waits for other ranks
