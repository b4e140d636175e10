"""A TP worker with its own GPU: a rank other than the first; see `rank`."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from ...memory.transfers.host_copies import CompleteTransfer
from ...memory.transfers.transfer import ExecutorLost
from ..config import EngineConfig
from ..model.weights.shard import Shard
from ..requests.plan_wire import plan_from_wire
from .cuda import CudaExecutor
from .cuda_rank_copies import TpWorkerCopies
from .cuda_rank_memory import DeviceRankContext, RankDevices
from .rank import TpWorker
from .shared_memory import MemoryLayout, SharedMemory

#: Seconds to wait for a message before checking the copies, or, if there are none, the device.
_COPY_SECONDS, _IDLE_SECONDS = 5e-4, 0.5


class _Unread(CompleteTransfer):
    """An adapter that is still being read and is in no rank's pages: its entries are void."""

    def wait_layer(self, layer: int, timeout: float = 0.0) -> bool:
        return False


class CudaTpWorker(TpWorker):
    """Launches its share of the first rank's steps. An error ends the process: no collective can be cancelled."""

    fatal = "meet", "measure", "open", "step"
    _copies: TpWorkerCopies | None = None

    def __init__(
        self, config: EngineConfig, layout: MemoryLayout, devices: RankDevices, shard: Shard, memory_fd: int
    ) -> None:
        device = devices.open_device(shard.rank)
        self._devices = devices
        self._rank_context = DeviceRankContext(shard, SharedMemory(memory_fd, layout), device)
        self._cuda = CudaExecutor(config, device, rank_context=self._rank_context)
        super().__init__(self._cuda)

    def meet(self, store: str, seconds: float) -> None:
        self._rank_context.meet(self._devices.open_collectives, store, seconds)

    def measure(self) -> int:
        return self._cuda.measure()

    def open(self, num_pages: int) -> None:
        self._cuda.open(num_pages)
        self._copies = copies = TpWorkerCopies(
            self._rank_context, self._cuda, self._devices.open_driver(self._rank_context.device)
        )
        self.place, self.copy, self.cancel, self.pin = copies.place, copies.copy, copies.cancel, copies.pin

    def step(self, plan: Mapping[str, Any], asks_logits: bool, coming: Mapping[int, int | None]) -> list[str]:
        """Launch a step; see `CudaExecutor.follow`.

        coming: for each `lora_index` whose adapter is in transit, the number of its copy; None if the copy has not
        begun.
        """
        assert self._copies is not None
        found = plan_from_wire(plan, self._find)
        for lora_index, adapter in enumerate(found.adapters):
            number = coming.get(lora_index, -1)
            adapter.transfer = _Unread() if number is None else self._copies.get(number)
        return self._cuda.follow(found, asks_logits)

    def receive(self, link: Connection) -> Any:
        """Return the next message; copies continue until it comes, and a failed device ends the process."""
        try:
            while True:
                is_copying = self._copies is not None and self._look(self._copies)
                if link.poll(_COPY_SECONDS if is_copying else _IDLE_SECONDS):
                    return link.recv()
        except (EOFError, OSError):  # the first rank has closed
            self._close()
            raise

    def _close(self) -> None:
        """Release the device from waiting, then end its work, then the captured steps, which closing the collectives
        requires.
        """
        self._rank_context.lose()
        if self._copies is not None:
            self._cuda.close()
        self._rank_context.close()

    def _look(self, copies: TpWorkerCopies) -> bool:
        try:
            self._cuda.advance()
            return copies.look()
        except ExecutorLost as error:
            raise SystemExit(f"chorus: error: {error}") from error
