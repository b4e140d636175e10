"""What ranks on several GPUs are made of: their devices, and the host memory that all of them see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...graphs.device import CudaDevice
from ...memory.transfers.cuda_driver import CupyDriver, MissingCupy
from ...ops.device_ranks import open_group
from ...ops.ranks import Ranks, Sums
from ..model.shard import Shard
from .image_memory import ImageMemory, Pinning

#: Copies between host memory and all ranks' arenas that may be under way at once.
NUM_COPIES = 4096

#: How far a rank's share of a copy is; the last two are over.
COMING, FAILED, DONE, VOID = range(4)


class DeviceSums(Sums, Protocol):
    """Sums on devices, which end."""

    def close(self) -> None:
        """Let this process join other ranks."""
        ...


class OpenSums(Protocol):
    """How ranks meet."""

    def __call__(self, ranks: Ranks, device: torch.device, store: str, seconds: float) -> DeviceSums:
        """Join the other ranks, which name the same file; ranks: of the host's memory."""
        ...


def _open_driver(device: CudaDevice) -> Pinning | None:
    try:
        return CupyDriver(device.torch_device.index or 0, device.failure)
    except MissingCupy:
        return None


def _open_sums(ranks: Ranks, device: torch.device, store: str, seconds: float) -> DeviceSums:
    return open_group("nccl", ranks.rank, ranks.size, device, store, seconds)


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The devices of ranks; what is called goes to the other ranks' processes. open_driver: None where host
    memory can't be pinned.
    """

    open_device: Callable[[int], CudaDevice] = CudaDevice
    open_driver: Callable[[CudaDevice], Pinning | None] = _open_driver
    open_sums: OpenSums = _open_sums


class DeviceSeat:
    """A rank's place among several on GPUs: its share of the model, its device, and how the ranks meet.

    states: `[size, NUM_COPIES]`, how far each rank's share of each copy is.
    """

    def __init__(self, shard: Shard, memory: ImageMemory, device: CudaDevice, seconds: float) -> None:
        self.shard, self.memory, self.device = shard, memory, device
        self.states = memory.more(np.int32).reshape(shard.size, NUM_COPIES)
        self._ranks = memory.ranks(shard.rank, seconds)
        self._ranks.begin(1)  # steps of a device follow each other without a pause: all are one
        self._sums: DeviceSums | None = None
        self._lock = threading.Lock()
        self.is_lost = False

    @staticmethod
    def more_bytes(size: int) -> int:
        """Bytes beside images that ranks share."""
        return size * NUM_COPIES * np.dtype(np.int32).itemsize

    def meet(self, open_sums: OpenSums, store: str, seconds: float) -> None:
        """Join the other ranks; see `RankDevices.open_sums`."""
        with self.device.scope():
            sums = open_sums(self._ranks, self.device.torch_device, store, seconds)
        with self._lock:
            self._sums = sums
            is_lost = self.is_lost
        if is_lost:
            sums.lose()

    @property
    def sums(self) -> Sums:
        """Of ranks that have met."""
        if self._sums is None:
            raise RuntimeError("the ranks have not met")
        return self._sums

    def lose(self) -> None:
        """Have this rank never wait for the others again; from any thread."""
        with self._lock:
            self.is_lost, sums = True, self._sums
        self._ranks.lose()
        if sums is not None:
            sums.lose()

    def close(self) -> None:
        """Let this process join other ranks; nothing waits for these any more."""
        self.lose()
        if self._sums is not None:
            self._sums.close()
