"""Tokens that tenants have used, in a fixed-size file that processes share."""

from __future__ import annotations

import fcntl
import math
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

BUCKETS = 1 << 13
SLOTS = 8
"""Slots of a bucket. Of 10,000 tenants, fewer than one in 100,000 finds its bucket full."""

_SLOT = struct.Struct("<IId")
_BUCKET_BYTES = SLOTS * _SLOT.size
_TICKS = 100  # stored times are multiples of this part of a second
_WRAP = 1 << 32


class Spent(NamedTuple):
    """Used tokens at a time of the clock, not counting those that had come back."""

    used: float
    at: float


class SpentSlots:
    """A slot of 16 bytes for each tenant: a tag of its name, a time, and the used tokens at that time.

    The hash of a tenant's name selects its bucket; in a full bucket the slot that was written longest ago is reused. An
    update writes one slot in place, under the bucket's lock. Nothing is ever truncated, and the file's blocks are
    allocated once. An invalid slot counts as nothing used.
    """

    def __init__(self, file: Path, clock: Callable[[], float]) -> None:
        """clock: the same in all processes; its zero may be any moment. Raises OSError."""
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._clock = clock
        self.num_unreadable = 0
        """Slots with invalid contents, and buckets that were missing."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, BUCKETS * _BUCKET_BYTES)
        elif os.fstat(self._file).st_size < BUCKETS * _BUCKET_BYTES:
            os.ftruncate(self._file, BUCKETS * _BUCKET_BYTES)

    def add(self, tenant: str, tokens: int, per_minute: int) -> Spent:
        """Add to a tenant's used tokens, and return the sum. Raises OSError."""
        tag, begin = _place(tenant)
        with self._locked(begin):
            now = int(self._clock() * _TICKS)
            bucket = os.pread(self._file, _BUCKET_BYTES, begin)
            if len(bucket) < _BUCKET_BYTES:  # the file was truncated by someone
                self.num_unreadable += 1
                bucket = bucket.ljust(_BUCKET_BYTES, b"\0")
            slots = list(_SLOT.iter_unpack(bucket))
            index, used = self._find(slots, tag, now, per_minute)
            if tokens:
                used += tokens
                os.pwrite(self._file, _SLOT.pack(tag, now % _WRAP, used), begin + index * _SLOT.size)
        return Spent(used, now / _TICKS)

    def _find(self, slots: list[tuple[int, int, float]], tag: int, now: int, per_minute: int) -> tuple[int, float]:
        """Return the tenant's slot, or one to use for it, and its used tokens by now."""
        for index, (owner, then, used) in enumerate(slots):
            if owner != tag:
                continue
            ticks = (now - then) % _WRAP
            if not math.isfinite(used) or used < 0 or ticks > _WRAP // 2:
                self.num_unreadable += 1
                return index, 0.0
            return index, max(0.0, used - ticks / _TICKS * per_minute / 60)
        oldest = max(range(SLOTS), key=lambda index: (not slots[index][0], (now - slots[index][1]) % _WRAP))
        return oldest, 0.0

    @contextmanager
    def _locked(self, begin: int) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX, _BUCKET_BYTES, begin)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, _BUCKET_BYTES, begin)


def _place(tenant: str) -> tuple[int, int]:
    """Return the tenant's tag, which is not 0, and the offset of its bucket."""
    tag, bucket = struct.unpack("<II", blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    return tag or 1, bucket % BUCKETS * _BUCKET_BYTES
