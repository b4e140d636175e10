"""Adapters' bytes on the host, in the layout of their device pages: the HOST tier.

Reads from disk run beside the engine in a thread pool; what was read is kept, least recently used first out, up to a
number of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from .host_image import HostImage
from .short_slices import ask_for_short_slices


class Reads(Protocol):
    """Runs reads; the simulator injects one that takes virtual time."""

    def submit(self, read: Callable[[], Any]) -> Future: ...

    def wait(self, pending: list[Future], timeout: float) -> None:
        """Let time go by until one of `pending` has ended, at most `timeout` seconds."""
        wait(pending, timeout, FIRST_COMPLETED)

    def shutdown(self) -> None: ...


class ThreadReads(Reads):
    """Reads in threads of their own, so that the engine's thread never waits for a disk."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="adapter-read", initializer=ask_for_short_slices)

    def submit(self, read: Callable[[], Any]) -> Future:
        return self._pool.submit(read)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class InlineReads(Reads):
    """Reads at once, on the caller's thread: what is asked for is ready when the call returns."""

    def submit(self, read: Callable[[], Any]) -> Future:
        future: Future = Future()
        try:
            future.set_result(read())
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Nothing is under way."""


class HostImages:
    """Images by key, whole or being read. Used by one thread; only the reads themselves run elsewhere."""

    def __init__(self, capacity_bytes: int, reads: Reads) -> None:
        self.capacity_bytes = capacity_bytes
        self._reads = reads
        self._entries: OrderedDict[Hashable, tuple[Future, int, HostImage]] = OrderedDict()
        self.num_bytes = 0

    def request(self, key: Hashable, num_bytes: int, read: Callable[[HostImage], None]) -> None:
        """Start reading `key` unless it is here or on its way. read: fills the image, layer by layer."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        self._shrink(self.capacity_bytes - num_bytes)
        image = HostImage()

        def run() -> None:
            try:
                read(image)
            except BaseException as error:
                image.fail(error)
                raise

        self._entries[key] = (self._reads.submit(run), num_bytes, image)
        self.num_bytes += num_bytes

    def is_requested(self, key: Hashable) -> bool:
        return key in self._entries

    def is_ready(self, key: Hashable) -> bool:
        """Whether `take` would not block: the read has ended, well or badly."""
        entry = self._entries.get(key)
        return entry is not None and entry[0].done()

    def peek(self, key: Hashable) -> HostImage:
        """The image as far as it has been read."""
        return self._entries[key][2]

    def take(self, key: Hashable) -> HostImage:
        """The whole image, waiting for its read if need be. A failed read raises its error and is forgotten."""
        future, _, image = self._entries[key]
        try:
            future.result()
        except BaseException:
            self.drop(key)
            raise
        self._entries.move_to_end(key)
        return image

    def drop(self, key: Hashable) -> None:
        """Forget an image; a read that has not begun is cancelled."""
        if entry := self._entries.pop(key, None):
            entry[0].cancel()
            self.num_bytes -= entry[1]

    def wait(self, timeout: float) -> None:
        """Sleep until a read under way ends, at most `timeout` seconds."""
        self._reads.wait([future for future, *_ in self._entries.values() if not future.done()], timeout)

    def close(self) -> None:
        self._reads.shutdown()
        self._entries.clear()
        self.num_bytes = 0

    def _shrink(self, capacity: int) -> None:
        """Drop the least recently used images that are read until at most `capacity` bytes are left."""
        if self.num_bytes <= capacity:
            return
        for key in [key for key, (future, *_) in self._entries.items() if future.done()]:
            if self.num_bytes <= capacity:
                return
            self.drop(key)
