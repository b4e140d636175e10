"""An executor with several TP ranks, one process and one GPU of this machine each (tensor parallelism).

The first rank is this process. It sends each step's plan, launches its own share, and reads the tokens later.
Collectives run on the devices in launch order, which is the same on every rank. Launched work can't be cancelled, so a
step that fails on any rank ends all of them.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...graphs.device import DeviceError
from ...memory.transfers.transfer import ExecutorLost
from ...ops.ranks.device_ranks import RanksUnavailable, check_nccl
from ...ops.ranks.ranks import RanksLost
from ..config import EngineConfig
from ..requests.plan_wire import plan_to_wire
from ..requests.types import StepPlan, StepResult
from .base import StartedStep
from .cuda import CudaExecutor, CudaShapes
from .cuda_rank import CudaTpWorker
from .cuda_rank_copies import CudaRankAdapters, RankCopies, RankTransfer
from .cuda_rank_memory import DeviceRankContext, RankDevices
from .ranks import PATIENCE_SECONDS, RanksExecutorBase
from .shared_memory import MemoryLayout, SharedMemory, image_bytes
from .swaps import PageSwaps
from .worker_processes import STOP_SECONDS

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that ranks may take to join, after loading their weights.
_JOIN_SECONDS = 300.0

#: Seconds between two checks of whether the host waits for a device.
_LOOK_SECONDS = 1.0

_LOST = "a rank has ended or kept the others waiting for too long"


class CudaRanksExecutor(RanksExecutorBase[CudaExecutor]):
    """Runs steps on `config.tensor_parallel_size` GPUs; the first one is a `CudaExecutor` in this process."""

    def __init__(
        self, config: EngineConfig, devices: RankDevices | None = None, patience: float = PATIENCE_SECONDS
    ) -> None:
        """Raises UnsupportedModel, DeviceError, and RuntimeError, which names the rank that can't join."""
        if devices is None:
            devices = RankDevices()
            check_gpus(config)
        device = devices.open_device(0)
        super().__init__(config, patience, partial(CudaShapes, device=device))
        shapes, size = self.shapes, config.tensor_parallel_size
        self._open, self._wait, self._is_closed = deque[_RankStep](), None, threading.Event()
        layout = MemoryLayout(size, 0, DeviceRankContext.more_bytes(size), image_bytes(config.host_bytes))
        self._folder = tempfile.TemporaryDirectory(prefix="chorus-ranks-")  # where the processes find each other
        fd = SharedMemory.create(layout)
        try:
            memory = SharedMemory(fd, layout, devices.open_driver(device))
            self._rank_context = rank_context = DeviceRankContext(shapes.shard, memory, device)
            self._begin(partial(CudaTpWorker, config, layout, devices), fd, rank_context)
        finally:
            os.close(fd)
        try:
            self.first = CudaExecutor(config, device, rank_context=rank_context)
            self._join()
            self.num_pages = self._meet(devices)
            copies = RankCopies(rank_context, self.first, self._processes.send, patience)
            self.adapters = CudaRankAdapters(shapes, copies, memory, config.max_lora_rank)
            self.swaps = PageSwaps(self.first.arena, self.adapters.dma)
            if rank_context.is_lost:
                raise RuntimeError(self._processes.why() or _LOST)
        except BaseException:
            self._processes.close()
            rank_context.close()
            self._folder.cleanup()
            raise
        self._serve(self._beside)
        threading.Thread(target=self._watch_waits, name="chorus-ranks", daemon=True).start()

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`. A step that fails ends the executor."""
        return self.start(plan).result()

    def start(self, plan: StepPlan) -> StartedStep:
        """Launch a step on all ranks; see `Executor.start`."""
        coming = {
            lora_index: adapter.transfer.number
            for lora_index, adapter in enumerate(plan.adapters)
            if isinstance(adapter.transfer, RankTransfer)
        }
        self._known.introduce_all(plan)
        self._processes.send(
            "step", plan_to_wire(plan, samples=False), self.first.steps.outputs.asks_logits(plan.sequences), coming
        )
        step = _RankStep(self, self._launched(partial(self.first.start, plan)))
        self._open.append(step)
        return step

    def close(self) -> None:
        self._is_closed.set()
        try:
            super().close()
        finally:
            self._rank_context.close()
            self._folder.cleanup()

    def read(self, step: _RankStep) -> StepResult:
        """Wait for a step's tokens, and for the other ranks' replies."""
        result = self._launched(step.started.result)
        while step in self._open:
            self._collect()
        if self._rank_context.is_lost:
            raise ExecutorLost(_LOST)
        for request_id in step.late:
            result.retract(request_id)
        return result

    def _meet(self, devices: RankDevices) -> int:
        """Make all ranks join, measure and open; return the number of pages of each."""
        store = str(Path(self._folder.name) / "store")
        self._together(
            lambda: self._rank_context.meet(devices.open_collectives, store, _JOIN_SECONDS),
            "meet",
            store,
            _JOIN_SECONDS,
        )
        own, others = self._together(self.first.measure, "measure")
        num_pages = min(own, *others)
        self._together(lambda: self.first.open(num_pages), "open", num_pages)
        return num_pages

    def _together(self, work: Callable[[], T], name: str, *arguments: Any) -> tuple[T, list[Any]]:
        """Like `WorkerProcesses.beside`, for work in which ranks wait for each other: if one fails, all leave it."""
        self._processes.send(name, *arguments)
        try:
            result = work()
        except Exception as error:
            if (why := self._lose(error)) is not None:
                raise RuntimeError(why) from error
            raise
        return result, self._processes.answers()

    def _lose(self, error: Exception) -> str | None:
        """Stop all ranks from waiting; return another rank's error if that is why the first rank failed."""
        is_another = self._rank_context.is_lost or isinstance(error, RanksLost) or self._processes.have_ended
        self._rank_context.lose()
        return self._processes.why() if is_another else None

    def _launched(self, work: Callable[[], T]) -> T:
        """Do the first rank's part of a step. Raises ExecutorLost if it fails."""
        try:
            with self._limited():
                return work()
        except Exception as error:
            if (why := self._lose(error)) is not None:
                raise ExecutorLost(why) from error
            if isinstance(error, ExecutorLost):
                raise
            if isinstance(error, RanksLost):
                raise ExecutorLost(str(error)) from error
            raise ExecutorLost(f"the first rank could not compute its share of a step: {error}") from error

    def _beside(self, work: Callable[[], T], name: str, *arguments: Any) -> tuple[T, list[Any]]:
        while self._open:
            self._collect()
        with self._limited():
            return self._processes.beside(work, name, *arguments)

    def _collect(self) -> None:
        """Take the replies to the oldest step without replies. Raises ExecutorLost."""
        step = self._open.popleft()
        seconds = STOP_SECONDS if self._rank_context.is_lost else None
        try:
            step.late = {name for names in self._processes.answers(seconds=seconds) for name in names}
        except ExecutorLost:
            raise
        except Exception as error:
            self._rank_context.lose()
            raise ExecutorLost(str(error)) from error

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Within this context, ranks are lost after `patience` seconds: the host may wait for a stuck device."""
        self._wait = object()
        try:
            yield
        finally:
            self._wait = None

    def _watch_waits(self) -> None:
        """End a wait that takes too long; runs on its own thread. Time while this process is stopped does not count."""
        looks, before = 0, None
        while not self._is_closed.wait(_LOOK_SECONDS):
            now = self._wait
            looks, before = looks + 1 if now is not None and now is before else 0, now
            waited = looks * _LOOK_SECONDS
            if waited > self._patience and not self._rank_context.is_lost:
                logger.error("work launched on the ranks' GPUs took more than %g s", self._patience)
                self._rank_context.lose()
            if waited > self._patience + STOP_SECONDS:  # only the end of the other processes may end this wait
                self._processes.close()
                return


class _RankStep:
    """A step that all ranks have received."""

    def __init__(self, owner: CudaRanksExecutor, started: StartedStep) -> None:
        self._owner, self.started = owner, started
        self.late: set[str] = set()
        """Requests with void entries on other ranks, once these have replied."""

    def sample(self) -> None:
        self.started.sample()

    def result(self) -> StepResult:
        return self._owner.read(self)


def check_gpus(config: EngineConfig) -> None:
    """Raise DeviceError unless there are NCCL and a GPU for each rank, from the first GPU on."""
    size = config.tensor_parallel_size
    if config.device not in ("auto", "cuda", "cuda:0"):
        raise DeviceError(
            f"tensor_parallel_size is {size} and device {config.device}, but ranks use the GPUs from 0 on; set device "
            "to cuda, and CUDA_VISIBLE_DEVICES to the GPUs to use"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < size:
        raise DeviceError(
            f"tensor_parallel_size is {size}, but each rank needs a GPU and PyTorch finds {count}; set it to "
            f"{max(1, count)} or less, or device to cpu"
        )
    try:
        check_nccl()
    except RanksUnavailable as error:
        raise DeviceError(f"tensor_parallel_size is {size}, and ranks on GPUs need NCCL: {error}") from error
