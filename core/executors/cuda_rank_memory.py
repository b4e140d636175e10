"""What ranks on several GPUs are made of: their devices, and the host memory that all of them see."""

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
from ...ops.device_ranks import open_group
from ...ops.ranks import Collectives, RanksLost
from ..model.shard import Shard
from .shared_memory import Pinning, SharedMemory

#: Copies between host memory and all ranks' arenas that may be under way at once.
NUM_COPIES = 4096

#: Seconds between two looks at whether a rank has ended for which this one waits.
_LOOK_SECONDS = 0.1

#: How far a rank's share of a copy is; the last two are over.
COMING, FAILED, DONE, VOID = range(4)


class DeviceCollectives(Collectives, Protocol):
    """Sums on devices, which end."""

    def close(self) -> None:
        """Let this process join other ranks."""
        ...


#: Joins the other ranks, which name the same file, within so many seconds.
OpenCollectives = Callable[[Shard, torch.device, str, float], DeviceCollectives]


def _open_driver(device: CudaDevice) -> Pinning | None:
    try:
        return CupyDriver(device.torch_device.index or 0, device.failure)
    except MissingCupy:
        return None


def _open_collectives(shard: Shard, device: torch.device, store: str, seconds: float) -> DeviceCollectives:
    return open_group("nccl", shard.rank, shard.size, device, store, seconds)


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The devices of ranks; what is called goes to the other ranks' processes. open_driver: None where host
    memory can't be pinned.
    """

    open_device: Callable[[int], CudaDevice] = CudaDevice
    open_driver: Callable[[CudaDevice], Pinning | None] = _open_driver
    open_collectives: OpenCollectives = _open_collectives


class DeviceRankContext:
    """A rank's place among several on GPUs: its share of the model, its device, and how the ranks meet.

    states: `[size, NUM_COPIES]`, how far each rank's share of each copy is.
    """

    def __init__(self, shard: Shard, memory: SharedMemory, device: CudaDevice) -> None:
        self.shard, self.memory, self.device = shard, memory, device
        self.states = memory.more(np.int32).reshape(shard.size, NUM_COPIES)
        self._collectives: DeviceCollectives | None = None
        self._lock = threading.Lock()
        self.is_lost = False

    @staticmethod
    def more_bytes(size: int) -> int:
        """Bytes beside images that ranks share."""
        return size * NUM_COPIES * np.dtype(np.int32).itemsize

    def meet(self, open_collectives: OpenCollectives, store: str, seconds: float) -> None:
        """Join the other ranks, and add up a first sum with them; see `RankDevices.open_collectives`. On a thread of
        its own, as the wait for a rank that does not come may have no end. Raises RanksLost after so many seconds, or
        once the ranks are lost.
        """
        met: Future[None] = Future()
        work = partial(self._meet, met, open_collectives, store, seconds)
        threading.Thread(target=work, name="chorus-meeting", daemon=True).start()
        deadline = time.monotonic() + seconds
        while not wait([met], _LOOK_SECONDS).done:
            if self.is_lost:
                raise RanksLost("a rank has ended before all had met")
            if time.monotonic() > deadline:
                raise RanksLost(
                    f"the ranks have not added up a first sum within {seconds:g} s; with NCCL_DEBUG=INFO NCCL says why"
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
        """The collectives of ranks that have met."""
        if self._collectives is None:
            raise RuntimeError("the ranks have not met")
        return self._collectives

    def lose(self) -> None:
        """Have this rank never wait for the others again; from any thread."""
        with self._lock:
            self.is_lost, collectives = True, self._collectives
        if collectives is not None:
            collectives.lose()

    def close(self) -> None:
        """Let this process join other ranks; nothing waits for these any more, and no captured step has their sums."""
        self.lose()
        if self._collectives is not None:
            self._collectives.close()
