"""Spans of a file for one pass over them, past the system's page cache.

What is read here is kept by us, in another layout; a second copy in the page cache would only cost the time to fill it
and push out what others need. What is in the page cache already is taken from there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from functools import cache

import numpy as np

#: O_DIRECT wants offsets, lengths and addresses to be multiples of the disk's sector.
_ALIGNMENT = 4096
_MERGE_BYTES = 64 << 10  # what lies between two spans is read along when it is this little

_local = threading.local()


class FileSpans:
    """Reads spans of an open file into memory of its thread; the next `read` overwrites it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._direct = _open_direct(fd)

    def __enter__(self) -> FileSpans:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def read(self, spans: Iterable[tuple[int, int]]) -> SpanAddresses | None:
        """The bytes `start … end` of every span; None when the file ends before, or can't be read."""
        merged = _merge(spans)
        room = sum(_up(end) - _down(start) for start, end in merged)
        buffer = _buffer(room)
        places = []
        at = 0
        for start, end in merged:
            first = _down(start)
            try:
                count = self._read(memoryview(buffer)[at : at + _up(end) - first], first)
            except OSError:
                return None
            if first + count < end:
                return None
            places.append((start, end, at + start - first))
            at += _up(end) - first
        return SpanAddresses(buffer, places)

    def _read(self, target: memoryview, start: int) -> int:
        """Fill `target` from the aligned `start`; returns how many bytes the file had."""
        direct = self._direct is not None and not _is_cached(self._fd, start, len(target))
        fd = self._direct if direct else self._fd
        done = 0
        while done < len(target):
            at = _down(done)
            count = os.preadv(fd, [target[at:]], start + at)
            if at + count <= done:
                return done
            done = at + count
        return done


class SpanAddresses:
    """Where in memory the bytes of spans are, until the next read."""

    def __init__(self, buffer: mmap.mmap, places: list[tuple[int, int, int]]) -> None:
        self._base = _address(buffer)
        self._places = places

    def __call__(self, offset: int) -> int:
        """The address of the file's byte `offset`, which must lie in a span."""
        for start, end, at in self._places:
            if start <= offset < end:
                return self._base + at + offset - start
        raise KeyError(offset)


def _open_direct(fd: int) -> int | None:
    """The same file past the page cache; None where the system has no such thing."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (AttributeError, OSError):
        return None


def _is_cached(fd: int, start: int, num_bytes: int) -> bool:
    """Whether the page cache holds these bytes; a guess costs nothing but time."""
    libc = _libc()
    num_bytes = min(num_bytes, os.fstat(fd).st_size - start)
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


def _merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + _MERGE_BYTES:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _buffer(num_bytes: int) -> mmap.mmap:
    """Page-aligned memory, kept from read to read: the system clears fresh pages at some cost."""
    found: mmap.mmap | None = getattr(_local, "buffer", None)
    if found is None or len(found) < num_bytes:
        found = _local.buffer = mmap.mmap(-1, max(_ALIGNMENT, num_bytes))
    return found


def _down(offset: int) -> int:
    return offset // _ALIGNMENT * _ALIGNMENT


def _up(offset: int) -> int:
    return _down(offset + _ALIGNMENT - 1)
