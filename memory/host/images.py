"""Host images of adapters, in the layout of their device pages: the HOST tier.

Reads from disk run in the background. Images are kept up to a number of bytes; the budget that they share with other
users of host memory says which are dropped first.

Tests: tests/memory/host/test_host_images.py.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, KeysView, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from ..files.error import AdapterFormatError
from .budget import HostBudget
from .image import HostImage, ReadGivenUp
from .reads import Reads, ReadStalled, ReadWatch, ThreadReads

__all__ = ["HostImages", "ReadCounts", "Reads", "ThreadReads"]

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

#: Seconds between two checks of reads in flight.
_LOOK_SECONDS = 0.05
_READ_RATE = 1e9
"""Bytes per second of a read of which nothing else is known. Chosen."""
_MOST_SECONDS = 5.0
"""The most seconds counted between two checks: during the rest, the process or the machine was stopped."""


@dataclass(slots=True, eq=False)
class _Entry:
    """An image with its read."""

    future: Future
    num_bytes: int
    image: HostImage
    label: str
    may_drop: Callable[[], bool]
    """Returns True if the image may be dropped now."""
    worth: Callable[[], tuple[float, int]] | None = None
    """Returns the seconds to read it again, and how often it was used."""
    group: str = ""
    is_slow: bool = False
    """True if its read was set aside as slow."""
    is_given_up: bool = False

    @property
    def has_ended(self) -> bool:
        """True if the image is complete, or never will be."""
        return self.is_given_up or self.future.done()


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """Counts of reads."""

    num_under_way: int
    num_failed: int
    num_given_up: int
    oldest_seconds: float
    """The longest time without progress of a read in flight."""


class HostImages(Generic[Key]):
    """Images by key, complete or being read. One thread uses it; only the reads themselves run elsewhere.

    A read without progress for `stall_seconds`, somewhat longer for large layers, is abandoned: its image fails at
    once, and its thread continues until the read returns. Until then its memory counts, and the key is not read again.
    """

    def __init__(
        self,
        capacity_bytes: int,
        reads: Reads,
        clock: Callable[[], float] = time.monotonic,
        stall_seconds: float = 30.0,
        *,
        lru: bool = False,
    ) -> None:
        """lru: drop what was used longest ago first, whatever it costs."""
        self.budget = HostBudget(capacity_bytes, lru=lru)
        """Shared with the other users of this memory, which join it."""
        self.budget.join(self)
        self.num_bytes = 0
        self.reads = reads
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._entries: dict[Key, _Entry] = {}
        self._under_way: dict[Key, tuple[_Entry, ReadWatch]] = {}
        self._given_up: dict[Key, _Entry] = {}  # abandoned reads whose threads have not returned
        self._failed: set[Key] = set()  # keys of failed entries
        self._stopped = 0.0  # seconds that do not count
        self._looked = 0.0
        self._next_look = -math.inf
        self._last_moved = -math.inf
        self._num_failed = 0
        self._num_given_up = 0
        self._count_lock = threading.Lock()

    def request(
        self,
        key: Key,
        num_bytes: int,
        read: Callable[[HostImage], None],
        *,
        label: str = "the adapter",
        group: str = "",
        may_drop: Callable[[], bool] = lambda: True,
        worth: Callable[[], tuple[float, int]] | None = None,
    ) -> None:
        """Start reading `key` unless it has been read, is being read, or has failed. Never raises: the image fails
        instead.

        read: fills the image, layer by layer. label: its name in errors. group: see `Reads.submit`. may_drop: returns
        True if the image may be dropped once it has been read.
        """
        if self.keep(key):
            return
        self._forget_returned()
        image = HostImage()
        if key in self._given_up:
            image.fail(ReadStalled(f"{label}: an earlier read of it still hangs; check its disk"))
            self._add(key, _Entry(_ended(), 0, image, label, may_drop, worth))
            return
        self.budget.make_room(num_bytes)
        image.follow(self.reads.wake)  # after a first layer, requests may begin

        try:
            future = self.reads.submit(partial(self._read, image, label, read), group)
        except Exception as error:
            self._fail(image, label, error)
            future = _ended()
        entry = _Entry(future, num_bytes, image, label, may_drop, worth, group)
        self._add(key, entry)
        if not future.done():
            if not self._under_way:
                self._looked = self._now()
            self._under_way[key] = entry, ReadWatch(future, image, num_bytes, self._stall_seconds, self._now())

    def arrange(self, keys: Iterable[Key]) -> None:
        """Move reads of `keys` that have not begun to the head of the queue, in this order."""
        if len(self._under_way) > 1:
            self.reads.arrange([self._under_way[key][0].future for key in keys if key in self._under_way])

    def put(
        self,
        key: Key,
        num_bytes: int,
        image: HostImage,
        *,
        may_drop: Callable[[], bool] = lambda: True,
        worth: Callable[[], tuple[float, int]] | None = None,
    ) -> None:
        """Keep an image made elsewhere, in place of the one with this key."""
        self.drop(key)
        self.budget.make_room(num_bytes)
        self._add(key, _Entry(_ended(), num_bytes, image, "", may_drop, worth))

    def has_room(self, num_bytes: int) -> bool:
        """True if `num_bytes` more fit next to all that may not be dropped, and to what waiting requests need."""
        return self.budget.has_room(num_bytes)

    def is_loose(self, item: Hashable) -> bool:
        """True if an image may be dropped: it is complete, or never will be."""
        entry = self._entries[cast("Key", item)]
        return entry.may_drop() and entry.future.done()

    def is_requested(self, key: Key) -> bool:
        return key in self._entries

    def is_coming(self, key: Key) -> bool:
        """True if at least one layer has been read, or the read failed; False while the read is set aside as slow."""
        entry = self._entries.get(key)
        return entry is not None and entry.image.stream.num_ready != 0 and not self.is_slow(key)

    def keep(self, key: Key) -> bool:
        """Mark an image as used, complete or being read, so others are dropped first; return False if there is none."""
        if key not in self._entries:
            return False
        self._offer(key)
        return True

    def keys(self) -> KeysView[Key]:
        """Return the keys of all images, complete or being read."""
        return self._entries.keys()

    def is_ready(self, key: Key) -> bool:
        """True if the read has ended, with or without success."""
        entry = self._entries.get(key)
        return entry is not None and entry.has_ended

    def is_slow(self, key: Key) -> bool:
        """True while its read is set aside as slow, as of the last `watch`."""
        if key not in self._under_way:
            return False
        entry = self._under_way[key][0]
        return entry.is_slow and not entry.has_ended

    def pace(self, key: Key) -> tuple[float, float]:
        """Seconds without progress of a read in flight, including its wait for a thread, and mean seconds per layer;
        zeros if there is none.
        """
        if key not in self._under_way:
            return 0.0, 0.0
        now, (_, watch) = self._now(), self._under_way[key]
        if watch.look(now):
            self._last_moved = now
        return watch.quiet_seconds(now), watch.layer_seconds

    @property
    def has_failures(self) -> bool:
        """True if reads have failed, as of the last `watch`, and were not forgotten."""
        return bool(self._failed)

    def forget_failures(self) -> None:
        """Forget failed reads, so they may be tried again."""
        for key in list(self._failed):
            self.drop(key)

    def error(self, key: Key) -> BaseException | None:
        """Why the read of `key` has failed; None if it has not."""
        entry = self._entries.get(key)
        return entry.image.error if entry is not None and entry.has_ended else None

    def peek(self, key: Key) -> HostImage:
        """The image as far as it has been read."""
        return self._entries[key].image

    def take(self, key: Key) -> HostImage:
        """Return the image, as far as it has been read, for use. A failed read raises its error and is forgotten."""
        if (error := self.error(key)) is not None:
            self.drop(key)
            try:
                raise error
            finally:
                del error  # else the error's own frame refers to it
        self._offer(key)
        return self._entries[key].image

    def hasten(self, key: Key) -> None:
        """Have a reading thread move a complete image to faster memory, if it lies in slower and there is room by then.
        Never raises, and never waits.
        """
        entry = self._entries[key]
        if not entry.future.done() or not entry.image.is_slow:
            return
        try:
            self.reads.submit(partial(self._hasten, entry.image, entry.label or "an adapter"))
        except Exception as error:  # no thread; the next load tries again
            logger.warning("%s stays in slow memory: %s", entry.label or "an adapter", error)

    def drop(self, item: Hashable) -> None:
        """Drop an image by its key; a read that has not begun is cancelled, and one in flight ends with its next layer.

        Its data stays intact, because copies may still read it.
        """
        key = cast("Key", item)
        if (entry := self._entries.pop(key, None)) is None:
            return
        self.budget.withdraw(key)
        if self._under_way.pop(key, None) is not None:
            if entry.future.done():
                self._last_moved = self._now()  # its thread may have begun a waiting read meanwhile
            elif not entry.future.cancel():
                self._set_aside(entry)  # `watch` no longer sees it
                entry.image.fail(ReadGivenUp("it is no longer needed"))
        self._failed.discard(key)
        if self._given_up.get(key) is not entry:
            self.num_bytes -= entry.num_bytes

    def watch(self) -> None:
        """Check the reads in flight: set slow ones aside, abandon stalled ones.

        Slow reads are checked only now and then, because there may be many and this is called before every step.
        """
        if not self._under_way and not self._given_up:
            return
        self._stopped += max(0.0, self._now() - self._looked - _MOST_SECONDS)
        self._looked = now = self._now()
        is_due = now >= self._next_look
        under_way = ((key, entry) for key, (entry, _) in self._under_way.items() if is_due or not entry.is_slow)
        for key, entry in [(key, entry) for key, entry in under_way if entry.future.done()]:
            del self._under_way[key]
            self._last_moved = now
            if entry.image.error is not None:
                self._failed.add(key)
        if is_due:
            self._look(now)

    def _look(self, now: float) -> None:
        """Set slow reads aside, and abandon stalled ones."""
        self._next_look = now + _LOOK_SECONDS
        self._forget_returned()
        for _, watch in self._under_way.values():
            if watch.look(now):
                self._last_moved = now
        for key, (entry, watch) in list(self._under_way.items()):
            if not entry.is_slow and watch.is_slow(now):
                entry.is_slow = self._set_aside(entry)
            if hopeless := self._hopeless(entry, watch, now):
                self._give_up(key, entry, hopeless)

    def _hopeless(self, entry: _Entry, watch: ReadWatch, now: float) -> str:
        """Why a read is not worth waiting for; empty while it is."""
        if watch.stalled_seconds(now) > watch.patience:
            return f"its read made no progress for {watch.stalled_seconds(now):.0f} s"
        if watch.began is None:
            is_full = self.reads.is_full(entry.group)  # then the progress of others does not help it
            if now - (watch.last_moved if is_full else max(watch.last_moved, self._last_moved)) > watch.patience:
                return "its read could not begin, because all others hang"
        return ""

    def counts(self) -> ReadCounts:
        """Counts of reads, as of the last `watch`."""
        oldest = 0.0
        if self._under_way:
            now = self._now()
            oldest = max(watch.stalled_seconds(now) for _, watch in self._under_way.values())
        return ReadCounts(len(self._under_way), self._num_failed, self._num_given_up, oldest)

    def wait(self, timeout: float, beside: Sequence[Future[Any]] = ()) -> None:
        """Sleep until a read in flight brings a layer or ends, at most `timeout` seconds. beside: other reads."""
        pending = [entry.future for entry, _ in self._under_way.values()]
        self.reads.wait([future for future in (*pending, *beside) if not future.done()], timeout)

    def close(self) -> None:
        """Stop reading, without waiting for reads that hang."""
        for entry, _ in self._under_way.values():
            if not entry.future.cancel():
                entry.image.fail(ReadGivenUp("the engine is closed"))
        self.reads.shutdown()
        for key in self._entries:
            self.budget.withdraw(key)
        for entries in (self._entries, self._under_way, self._given_up, self._failed):
            entries.clear()
        self.num_bytes = 0

    def _now(self) -> float:
        return self._clock() - self._stopped

    def _add(self, key: Key, entry: _Entry) -> None:
        self._entries[key] = entry
        self.num_bytes += entry.num_bytes
        self._offer(key)
        if entry.has_ended and entry.image.error is not None:
            self._failed.add(key)

    def _offer(self, key: Key) -> None:
        """Tell the budget that an image was used just now."""
        entry = self._entries[key]
        cost, uses = (entry.num_bytes / _READ_RATE, 1) if entry.worth is None else entry.worth()
        self.budget.offer(self, key, entry.num_bytes, cost, uses)

    def _set_aside(self, entry: _Entry) -> bool:
        """Set a slow read aside: waiting reads may begin in its place, and their waiting times start again."""
        could = self.reads.set_aside(entry.future)
        if could:
            self._last_moved = self._now()
        return could

    def _give_up(self, key: Key, entry: _Entry, why: str) -> None:
        entry.is_given_up = True
        del self._under_way[key]
        self._failed.add(key)
        self._num_given_up += 1
        error = ReadStalled(f"{entry.label}: {why} and was abandoned; check its disk, or raise adapter_read_seconds")
        logger.error("%s", error)
        entry.image.fail(error)
        if not entry.future.cancel():
            self._set_aside(entry)
            self._given_up[key] = entry

    def _forget_returned(self) -> None:
        """Free the memory of abandoned reads whose threads have returned."""
        for key, entry in list(self._given_up.items()):
            if entry.future.done():
                del self._given_up[key]
                if self._entries.get(key) is not entry:
                    self.num_bytes -= entry.num_bytes

    def _read(self, image: HostImage, label: str, read: Callable[[HostImage], None]) -> None:
        try:
            read(image)
        except ReadGivenUp:
            pass
        except BaseException as error:
            self._fail(image, label, error)
            if not isinstance(error, Exception):
                raise
        finally:
            if image.error is not None:
                image.data = None  # it may have been abandoned before the data was set

    def _hasten(self, image: HostImage, label: str) -> None:
        try:
            image.hasten()
        except Exception as error:
            logger.warning("%s stays in slow memory\n%s", label, "".join(traceback.format_exception(error)))

    def _fail(self, image: HostImage, label: str, error: BaseException) -> None:
        if image.error is not None:  # it was abandoned
            return
        with self._count_lock:
            self._num_failed += 1
        if not isinstance(error, AdapterFormatError):  # its message says everything
            # As text: a log record that keeps a traceback would keep everything in its frames alive.
            logger.error("%s could not be read\n%s", label, "".join(traceback.format_exception(error)))
        image.fail(error)


def _ended() -> Future:
    future: Future = Future()
    future.set_result(None)
    return future
