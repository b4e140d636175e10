"""True if a read gets on."""

from __future__ import annotations

from concurrent.futures import Future

from ..files.error import AdapterFormatError, LoadFailure
from .image import HostImage

#: A read that takes longer has another beside it.
SLOW_SECONDS = 1.0

#: Layers come in groups of about so many bytes, and so slowly at least.
_GROUP_BYTES = 16 << 20
_LEAST_BYTES_PER_SECOND = 512 << 10


class ReadStalled(AdapterFormatError):
    """A read brought nothing for too long and is not waited for any more."""

    failure = LoadFailure.TIMEOUT


class ReadWatch:
    """Follows a read's progress; whoever owns it tells it the time.

    What counts is how long nothing came, not how long it all takes: a slow disk that goes on bringing layers may take
    its time. Layers come in groups, for which `patience` is more by what a group of `num_bytes` takes at 512 KiB/s.
    While it waits for a thread nothing counts.
    """

    __slots__ = ("_future", "_image", "_num_ready", "began", "last_moved", "patience")

    def __init__(self, future: Future, image: HostImage, num_bytes: int, stall_seconds: float, now: float) -> None:
        self._future = future
        self._image = image
        self._num_ready = 0
        self.began: float | None = None
        self.last_moved = now
        self.patience = stall_seconds + min(num_bytes, _GROUP_BYTES) / _LEAST_BYTES_PER_SECOND

    def look(self, now: float) -> bool:
        """Take note of how far it is; whether anything came since the last look."""
        if self.began is None:
            if not self._future.running():
                return False
            self.began = self.last_moved = now
        ready = self._image.stream.num_ready
        if ready == self._num_ready:
            return False
        self._num_ready, self.last_moved = ready, now
        return True

    def is_slow(self, now: float) -> bool:
        return self.began is not None and now - self.began > SLOW_SECONDS

    def stalled_seconds(self, now: float) -> float:
        """Seconds since anything came; 0 while it waits for a thread."""
        return 0.0 if self.began is None else now - self.last_moved
