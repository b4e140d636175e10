"""An adapter's bytes in host memory, in the layout of its pages: complete, or still being read.

Tests: tests/memory/host/test_host_images.py, tests/memory/host/test_layer_stream.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files.error import forget_frames

if TYPE_CHECKING:
    import torch

    from .buffers import Buffers


class LayerStream:
    """Counts the layers that have been read. One thread publishes; any thread may check, wait or fail it.

    A prefill that waits for layer l only when it reaches layer l is later than a warm one by about one layer's copy,
    not by all of them.
    """

    FAILED = -1

    def __init__(self, ready: np.ndarray | None = None) -> None:
        """ready: `[1]` int32, zero, to count in; other processes may see it."""
        self._ready = np.zeros(1, dtype=np.int32) if ready is None else ready
        self._changed = threading.Condition()

    @property
    def num_ready(self) -> int:
        """Layers 0 … num_ready-1 have been read; FAILED once the read has failed."""
        return int(self._ready[0])

    @property
    def address(self) -> int:
        """Address of the count, an int32 that native code may watch while the stream is alive."""
        return self._ready.ctypes.data

    def publish(self, num_ready: int) -> bool:
        """Publish layers 0 … num_ready-1, which must be written. If it has failed, return False and publish nothing."""
        with self._changed:
            if self._ready[0] == self.FAILED:
                return False
            self._ready[0] = num_ready
            self._changed.notify_all()
            return True

    def fail(self) -> None:
        """Mark the stream as failed: no more layers will come; thread-safe."""
        self.publish(self.FAILED)

    def wait(self, layer: int, timeout: float) -> bool:
        """Sleep until `layer` has been read, at most `timeout` seconds; return whether it has."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_ready > layer or self.num_ready == self.FAILED, timeout)
            return self.num_ready > layer


class ReadGivenUp(Exception):
    """The rest of an image is no longer needed: its read must end."""


class HostImage:
    """An image that is read layer by layer."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """Why it failed. A failed image has no memory and no followers, so the error keeps nothing alive."""
        self.data: Any = None
        """The buffer that the backend reads into and owns; set before the first layer is published."""
        self.stream = LayerStream()
        """Counts the layers in `data`; one thread reads, any may look."""
        self._buffers: Buffers | None = None
        self._followers: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()

    def take(self, buffers: Buffers, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Set `data` to an uninitialized tensor of these buffers, and return it."""
        data, self._buffers = buffers.take(shape, dtype), buffers
        self.data = data
        return data

    @property
    def is_slow(self) -> bool:
        """True if `data` lies in memory that is copied slower than other memory of its buffers."""
        data, buffers = self.data, self._buffers
        return data is not None and buffers is not None and buffers.is_slow(data)

    def hasten(self) -> None:
        """Move the `data` of a complete image to faster memory, if there is room; see `Buffers.moved`. Copies that have
        begun go on from where it was. The lock is taken only to change the reference.
        """
        data, buffers = self.data, self._buffers
        moved = None if data is None or buffers is None else buffers.moved(data)
        with self._lock:
            if moved is not None and self.error is None:
                self.data = moved

    def publish(self, num_ready: int) -> None:
        """Publish layers 0 … num_ready-1 of `data`, on the reading thread. Raises ReadGivenUp once it has failed."""
        if not self.stream.publish(num_ready):
            raise ReadGivenUp
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Mark the image as failed, with the error; thread-safe. Only the first failure counts.

        The error loses its frames, which refer to the buffers that were read into.
        """
        with self._lock:
            if self.error is not None:
                return
            forget_frames(error)
            self.error = error
        self.stream.fail()
        self._tell()
        with self._lock:
            self._followers = ()
        self.data = None

    def follow(self, follower: Callable[[], None]) -> None:
        """Call `follower` on the reading thread whenever more layers have been read from now on.

        Layers published before this call may cause no call: check `stream` afterwards.
        """
        with self._lock:
            if self.error is None:
                self._followers += (follower,)

    def unfollow(self, follower: Callable[[], None]) -> None:
        """Stop calling `follower`. Does nothing if it was not following."""
        with self._lock:
            self._followers = tuple(other for other in self._followers if other != follower)

    def _tell(self) -> None:
        for follower in self._followers:
            follower()
