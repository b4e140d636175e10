"""The parts of ranks on several GPUs: their devices, and the host memory that all of them share.

Tests: tests/core/executors/test_cuda_ranks.py
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from ...graphs.device import CudaDevice
from ...memory.transfers.cuda_driver import CupyDriver, MissingCupy
from ...ops.ranks.device_ranks import open_group
from ...ops.ranks.ranks import Collectives, RanksLost
from ..model.weights.shard import Shard
from .shared_memory import Pinning, SharedMemory

#: The most copies between host memory and all ranks' arenas in flight at once.
NUM_COPIES = 4096

#: Seconds between two checks of whether a rank that this one waits for has ended.
_LOOK_SECONDS = 0.1

#: Progress of a rank's share of a copy; in the last two states it has ended.
COMING, FAILED, DONE, VOID = range(4)


class DeviceCollectives(Collectives, Protocol):
    """Collectives on devices, which can be closed."""

    def close(self) -> None:
        """Close, so this process may join other ranks."""
        ...


#: Joins the other ranks, which name the same file, within the given seconds.
OpenCollectives = Callable[[Shard, torch.device, str, float], DeviceCollectives]


def _open_driver(device: CudaDevice) -> Pinning | None:
    try:
        return CupyDriver(device.torch_device.index or 0, device.failure)
    except MissingCupy:
        return None


def _open_collectives(shard: Shard, device: torch.device, store: str, seconds: float) -> DeviceCollectives:
    return open_group("nccl", rank=shard.rank, size=shard.size, device=device, store=store, seconds=seconds)


@dataclass(frozen=True, slots=True)
class RankDevices:
    """Functions that open the devices of ranks; they are pickled for the other ranks' processes."""

    open_device: Callable[[int], CudaDevice] = CudaDevice
    open_driver: Callable[[CudaDevice], Pinning | None] = _open_driver
    """Returns None if host memory can't be pinned."""
    open_collectives: OpenCollectives = _open_collectives


class DeviceRankContext:
    """The context of a TP rank on a GPU: its share of the model, its device, and its connection to the other ranks."""

    def __init__(self, shard: Shard, memory: SharedMemory, device: CudaDevice) -> None:
        self.shard, self.memory, self.device = shard, memory, device
        self.states = memory.more(np.int32).reshape(shard.size, NUM_COPIES)
        """`[size, NUM_COPIES]`, the progress of each rank's share of each copy."""
        self._collectives: DeviceCollectives | None = None
        self._lock = threading.Lock()
        self.is_lost = False

    @staticmethod
    def more_bytes(size: int) -> int:
        """Bytes that ranks share in addition to images."""
        return size * NUM_COPIES * np.dtype(np.int32).itemsize

    def meet(self, open_collectives: OpenCollectives, store: str, seconds: float) -> None:
        """Join the other ranks, and test the connection with a first sum; see `RankDevices.open_collectives`.

        It works on its own thread, because waiting for a rank that does not come may never end. Raises RanksLost after
        `seconds`, or once the ranks are lost.
        """
        met: Future[None] = Future()
        work = partial(self._meet, met, open_collectives, store, seconds)
        threading.Thread(target=work, name="chorus-meeting", daemon=True).start()
        deadline = time.monotonic() + seconds
        while not wait([met], _LOOK_SECONDS).done:
            if self.is_lost:
                raise RanksLost("a rank ended before all had joined")
            if time.monotonic() > deadline:
                raise RanksLost(
                    f"the ranks could not compute a first sum within {seconds:g} s; set NCCL_DEBUG=INFO to see why"
                )
        met.result()

    def _meet(self, met: Future[None], open_collectives: OpenCollectives, store: str, seconds: float) -> None:
        try:
            with self.device.scope():
                collectives = open_collectives(self.shard, self.device.torch_device, store, seconds)
                with self._lock:
                    self._collectives = collectives
                if self.is_lost:
                    collectives.lose()
                total = int(collectives.add_up(torch.ones(1, device=self.device.torch_device)).item())
            if total != self.shard.size:
                raise RuntimeError(f"the sum of {self.shard.size} ranks' ones is {total}")
        except BaseException as error:
            met.set_exception(error)
        else:
            met.set_result(None)

    @property
    def collectives(self) -> Collectives:
        """The collectives, once the ranks have joined."""
        if self._collectives is None:
            raise RuntimeError("the ranks have not joined yet")
        return self._collectives

    def lose(self) -> None:
        """Stop this rank from ever waiting for the others again; thread-safe."""
        with self._lock:
            self.is_lost, collectives = True, self._collectives
        if collectives is not None:
            collectives.lose()

    def close(self) -> None:
        """Close, so this process may join other ranks. Nothing may wait for these ranks, and no captured step may have
        their sums.
        """
        self.lose()
        if self._collectives is not None:
            self._collectives.close()
