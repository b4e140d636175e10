"""Spans of a file for one pass over them, past the system's page cache.

What is read here is kept by us, in another layout; a second copy in the page cache would only cost the time to fill it
and push out what others need. What is in the page cache already is taken from there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np

from .aio import AsyncReads

#: O_DIRECT wants offsets, lengths and addresses to be multiples of the disk's sector.
_ALIGNMENT = 4096
_MERGE_BYTES = 64 << 10  # what lies between two spans is read along when it is this little
_AHEAD = 4  # groups of spans under way or in use at once
_QUEUE = 64
_SAMPLE_BYTES = 64 << 10

_local = threading.local()

Spans = Iterable[tuple[int, int]]


class FileSpans:
    """Reads spans of an open file into memory of its thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._direct = _open_direct(fd)
        self._cached: bool | None = None
        self._queue = None if self._direct is None else _queue()

    def __enter__(self) -> FileSpans:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._queue is not None:
            self._queue.drain()  # before its memory is used for another file
        if self._direct is not None:
            os.close(self._direct)

    def read(self, groups: Sequence[Spans]) -> Iterator[SpanAddresses | None]:
        """Group by group, where the bytes `start … end` of its spans are, until the next group is asked for.

        None for a group that can't be read, or beyond the file's end. The first is on its way when this returns, the
        next ones are fetched while their predecessors are used.
        """
        pending = [_Group(self, spans, slot % _AHEAD) for slot, spans in enumerate(groups)]
        for group in pending[:1]:
            group.begin(self._queue)
        return self._finish(pending)

    def _finish(self, pending: Sequence[_Group]) -> Iterator[SpanAddresses | None]:
        try:
            for index, group in enumerate(pending):
                group.begin(self._queue)
                addresses = group.finish(self._queue, pending)
                for other in pending[index + 1 : index + _AHEAD]:
                    other.begin(self._queue)  # not before the first is here, which somebody waits for
                yield addresses
        finally:
            if self._queue is not None:
                self._queue.drain()

    def is_cached(self, start: int, num_bytes: int) -> bool:
        """Asked once for all of the file: to unmap what was asked about interrupts every processor of the process."""
        if self._cached is None:
            self._cached = _is_cached(self._fd, start, num_bytes)
        return self._cached

    @property
    def direct_fd(self) -> int | None:
        """The same file past the page cache; None where the system has no such thing."""
        return self._direct

    def read_into(self, target: memoryview, start: int, done: int = 0) -> int:
        """Fill `target` from the aligned `start`, `done` bytes of it being there; returns how many the file had."""
        if done >= len(target):
            return done
        direct = self._direct is not None and not self.is_cached(start, len(target))
        fd = self._direct if direct else self._fd
        while done < len(target):
            at = _down(done)
            count = os.preadv(fd, [target[at:]], start + at)
            if at + count <= done:
                return done
            done = at + count
        return done


class _Group:
    """Spans that are read together, in one of the thread's buffers."""

    def __init__(self, file: FileSpans, spans: Spans, slot: int) -> None:
        self._file = file
        self._spans = merged(spans)
        self._slot = slot
        self._begun = False
        self._missing: set[int] = set()  # keys of reads under way
        self._found: dict[int, int] = {}  # bytes of each span that are there

    def begin(self, queue: AsyncReads | None) -> None:
        """Have what is not in the page cache fetched, if it has not been."""
        if self._begun or queue is None or len(self._spans) > queue.room:
            return
        self._begun = True
        if any(self._file.is_cached(_down(start), _up(end) - _down(start)) for start, end in self._spans):
            return
        base = _address(self._buffer())
        reads = [(id(self) + index, base + at, count, first) for index, (first, count, at) in enumerate(self._places())]
        try:
            queue.begin(self._file.direct_fd, reads)
        except OSError:
            queue.drain()  # nothing may write to the buffer while it is read in the plain way
            return
        self._missing = {key for key, *_ in reads}

    def finish(self, queue: AsyncReads | None, groups: Sequence[_Group]) -> SpanAddresses | None:
        while self._missing:
            for key, count in queue.wait():
                next(group for group in groups if key in group._missing)._arrived(key, count)
        buffer = self._buffer()
        places = []
        for index, ((start, end), (first, count, at)) in enumerate(zip(self._spans, self._places(), strict=True)):
            try:
                done = self._file.read_into(memoryview(buffer)[at : at + count], first, self._found.get(index, 0))
            except OSError:
                return None
            if first + done < end:
                return None
            places.append((start, end, at + start - first))
        return SpanAddresses(buffer, places)

    def _arrived(self, key: int, count: int) -> None:
        self._missing.remove(key)
        self._found[key - id(self)] = max(0, count)  # after an error it is read in the plain way, which tells why

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Of every span: where in the file it is read from, how many bytes, and where in the buffer they go."""
        at = 0
        for start, end in self._spans:
            first = _down(start)
            yield first, _up(end) - first, at
            at += _up(end) - first

    def _buffer(self) -> mmap.mmap:
        """Page-aligned memory, kept from read to read: the system clears fresh pages at some cost."""
        num_bytes = sum(count for _, count, _ in self._places())
        buffers: dict[int, mmap.mmap] = _local.__dict__.setdefault("buffers", {})
        found = buffers.get(self._slot)
        if found is None or len(found) < num_bytes:
            found = buffers[self._slot] = mmap.mmap(-1, max(_ALIGNMENT, num_bytes))
        return found


class SpanAddresses:
    """Where in memory the bytes of spans are."""

    def __init__(self, buffer: mmap.mmap, places: list[tuple[int, int, int]]) -> None:
        """places: start and end of each span in the file, ascending, and where in `buffer` it begins."""
        self._base = _address(buffer)
        self._starts, self._ends, self._at = np.array(places, dtype=np.int64).reshape(-1, 3).T

    def __call__(self, offset: int) -> int:
        """The address of the file's byte `offset`, which must lie in a span."""
        return int(self.of(np.array([offset]))[0])

    def of(self, offsets: np.ndarray) -> np.ndarray:
        """As a call, of many. KeyError when one lies in no span."""
        span = np.searchsorted(self._starts, offsets, "right") - 1
        if (span < 0).any() or (offsets >= self._ends[span]).any():
            raise KeyError(offsets)
        return self._base + self._at[span] + offsets - self._starts[span]

    def bytes(self, start: int, end: int) -> bytes:
        """A copy of what lies in the file from `start` to `end`, within one span."""
        return ctypes.string_at(self(start), end - start)


def _queue() -> AsyncReads | None:
    """The thread's own queue of reads; None where the system has no such thing."""
    if not hasattr(_local, "queue"):
        try:
            _local.queue = AsyncReads(_QUEUE)
        except OSError:
            _local.queue = None
    return _local.queue


def _open_direct(fd: int) -> int | None:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (AttributeError, OSError):
        return None


def _is_cached(fd: int, start: int, num_bytes: int) -> bool:
    """Whether the page cache holds these bytes, judged by the first: a wrong guess costs nothing but time."""
    libc = _libc()
    num_bytes = min(num_bytes, _SAMPLE_BYTES, os.fstat(fd).st_size - start)
    if libc is None or num_bytes <= 0:
        return False
    with mmap.mmap(fd, num_bytes, offset=start, access=mmap.ACCESS_READ) as view:  # never touched, only asked about
        pages = np.zeros(-(-num_bytes // mmap.PAGESIZE), dtype=np.uint8)
        return libc.mincore(_address(view), num_bytes, pages.ctypes.data) == 0 and bool((pages & 1).all())


@cache
def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return libc


def _address(buffer: mmap.mmap) -> int:
    return np.frombuffer(buffer, dtype=np.uint8).ctypes.data


def merged(spans: Spans) -> list[tuple[int, int]]:
    """The spans in order, those that lie close to each other as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + _MERGE_BYTES:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _down(offset: int) -> int:
    return offset // _ALIGNMENT * _ALIGNMENT


def _up(offset: int) -> int:
    return _down(offset + _ALIGNMENT - 1)
