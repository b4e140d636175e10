"""An adapter's bytes in host memory, in the layout of its pages: whole, or still being read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..files.error import forget_frames
from .layer_stream import LayerStream


class ReadGivenUp(Exception):
    """Nobody wants the rest of an image: its read is to end."""


class HostImage:
    """`data` is what the backend reads into: it is set before the first layer is published and belongs to the backend.

    stream: how many layers are in `data`; one thread reads, any may look. error: why it failed; it then holds no memory
    and is followed by nobody, so that whoever keeps the error keeps nothing else.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.data: Any = None
        self.stream = LayerStream()
        self._followers: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()

    def publish(self, num_ready: int) -> None:
        """Say that layers 0 … num_ready-1 are in `data`; on the reading thread. ReadGivenUp once it has failed."""
        if not self.stream.publish(num_ready):
            raise ReadGivenUp
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Say that the rest will never come, and why; from any thread. Only the first failure counts.

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
        """Have `follower` called on the reading thread whenever more layers have been read from now on.

        What was published before may not be told: look at `stream` afterwards.
        """
        with self._lock:
            if self.error is None:
                self._followers += (follower,)

    def unfollow(self, follower: Callable[[], None]) -> None:
        """`follower` needs to know no more. Nothing happens when it didn't follow."""
        with self._lock:
            self._followers = tuple(other for other in self._followers if other != follower)

    def _tell(self) -> None:
        for follower in self._followers:
            follower()
