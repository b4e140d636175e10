"""Progress of an adapter's read from the disk, layer by layer."""

from __future__ import annotations

import threading

import numpy as np


class LayerStream:
    """Counts the layers that are there. One thread publishes; any may look, wait or fail it.

    A prefill that waits for layer l only when it reaches layer l trails a warm one by about one layer's copy, instead
    of by all of them.
    """

    FAILED = -1

    def __init__(self) -> None:
        self._ready = np.zeros(1, dtype=np.int32)
        self._changed = threading.Condition()

    @property
    def num_ready(self) -> int:
        """Layers 0 … num_ready-1 are there; FAILED when the rest will never come."""
        return int(self._ready[0])

    @property
    def address(self) -> int:
        """Address of the count, an int32 that native code may watch while the stream is alive."""
        return self._ready.ctypes.data

    def publish(self, num_ready: int) -> bool:
        """Say that the bytes of layers 0 … num_ready-1 are written. False, and nothing said, once it has failed."""
        with self._changed:
            if self._ready[0] == self.FAILED:
                return False
            self._ready[0] = num_ready
            self._changed.notify_all()
            return True

    def fail(self) -> None:
        """Say that no more layers will come; from any thread."""
        self.publish(self.FAILED)

    def wait(self, layer: int, timeout: float) -> bool:
        """Sleep until `layer` is there, at most `timeout` seconds; whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_ready > layer or self.num_ready == self.FAILED, timeout)
            return self.num_ready > layer
