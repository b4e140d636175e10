"""The CPU as a device that is done with everything when the call returns; a graph is a call."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from chorus.graphs.device import CudaDevice


class HostDevice(CudaDevice):
    """memory_bytes: the free and the total memory that `memory` returns."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        self.torch_device = torch.device("cpu")
        self._memory_bytes = memory_bytes

    def scope(self):
        return nullcontext()

    def pinned(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> Any:
        return _PastEvent()

    def copy(self, target, source):
        target.copy_(source)

    def capture(self, work):
        work()

        def replay():
            work()

        return replay

    def seconds(self, work, count=5):
        """No time passes here; a test may say how much does."""
        work()
        return 0.0

    def memory(self):
        return self._memory_bytes, self._memory_bytes

    def peak_bytes(self, work):
        work()
        return 0

    def is_done(self) -> bool:
        return True

    def synchronize(self):
        """Nothing is under way."""

    def failure(self):
        return None

    def release(self):
        """Memory goes back by itself."""


class _PastEvent:
    def record(self):
        """Nothing to wait for: work is done when its call returns."""

    def synchronize(self):
        """It has happened."""
