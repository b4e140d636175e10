"""Counts requests in progress and spent tokens per key, in one process or in all that share a directory."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from ..errors import ApiError
from ..rare_log import RareLog
from .spent_slots import Spent, SpentSlots

log = logging.getLogger(__name__)

MAX_SHARED_SLOTS = 1 << 12
"""Largest bound that processes share; finding one taken slot costs 0.7 µs. A larger bound applies per process."""

MERGE_SECONDS = 0.1
"""Seconds for which tokens that were spent here are unknown to the other processes."""


class RequestSlots:
    """Request slots of tenants: how many requests each has in progress.

    Each request holds a slot: a lock on one byte of an empty file. The operating system releases a process's locks when
    it ends for any reason.
    """

    def __init__(self, file: Path | None = None) -> None:
        """file: shared by processes; None: this one is alone."""
        self._file = None if file is None else _open(file)
        self._held: dict[str, set[int]] = defaultdict(set)

    def take(self, tenant: str, most: int) -> int | None:
        """A free slot of a tenant's `most`; None if there is none."""
        held = self._held[tenant]
        if len(held) >= most:
            return None
        file = self._file if most <= MAX_SHARED_SLOTS else None
        free = (slot for slot in range(most) if slot not in held)
        found = next((slot for slot in free if file is None or _lock(file, _first(tenant) + slot)), None)
        if found is not None:
            held.add(found)
        return found

    def give_back(self, tenant: str, slot: int) -> None:
        if self._file is not None and slot < MAX_SHARED_SLOTS:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _first(tenant) + slot)
        self._held[tenant].discard(slot)
        if not self._held[tenant]:
            del self._held[tenant]

    def num_taken(self) -> int:
        """Slots taken by this process."""
        return sum(map(len, self._held.values()))


class TokenBudgets:
    """Tokens that tenants have used of their `tokens_per_minute`, which come back evenly.

    A request may begin while something is left. It is paid for as it goes, so a tenant can be in debt by what its
    requests in progress take, and then waits until that has come back. Processes that share a file add up what they
    have spent there, every `MERGE_SECONDS`. While the file can't be written, each process counts what it has spent
    itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, file: Path | None = None) -> None:
        """clock: the same in all processes, as the system's is."""
        self._clock = clock
        self._used: dict[str, Spent] = {}
        self._unshared: dict[str, tuple[int, int]] = {}  # tokens that are not in the file yet, and the bound
        self._merge_at = 0.0
        self._log = RareLog(log, clock=clock)
        self._num_unreadable = 0
        self._slots = None if file is None else self._open(file)

    def check(self, tenant: str, per_minute: int) -> None:
        """Raises an ApiError for a tenant that has nothing left."""
        self._merge_one(tenant, per_minute)
        used = self.used_by(tenant, per_minute)
        if used >= per_minute:
            message = f"your key's {per_minute} tokens a minute are used; try again later"
            wait = (used - per_minute + 1) * 60 / per_minute
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=wait)

    def spend(self, tenant: str, per_minute: int, tokens: int) -> None:
        self._used[tenant] = Spent(self.used_by(tenant, per_minute) + tokens, self._clock())
        if self._slots is not None:
            self._unshared[tenant] = self._unshared.get(tenant, (0, 0))[0] + tokens, per_minute
            if self._clock() >= self._merge_at:
                self.share()

    def share(self) -> None:
        """Tell the other processes at once what was spent here: nothing more may come that would."""
        self._merge_at = self._clock() + MERGE_SECONDS
        for tenant, (_, per_minute) in list(self._unshared.items()):
            if not self._merge_one(tenant, per_minute):
                return

    def _merge_one(self, tenant: str, per_minute: int) -> bool:
        """Add what a tenant spent here to what it spent in all processes, and take that over; False on an error."""
        if self._slots is None:
            return True
        tokens = self._unshared.get(tenant, (0, 0))[0]
        try:
            self._used[tenant] = self._slots.add(tenant, tokens, per_minute)
        except OSError as error:
            self._log.warning("tokens that keys have spent can't be shared with the other processes: %s", error)
            return False
        self._unshared.pop(tenant, None)
        if self._slots.num_unreadable > self._num_unreadable:
            self._num_unreadable = self._slots.num_unreadable
            self._log.warning(
                "the shared file of tokens was damaged: a key's tokens count as not spent (%d so far)",
                self._num_unreadable,
            )
        return True

    def _open(self, file: Path) -> SpentSlots | None:
        try:
            return SpentSlots(file, self._clock)
        except OSError as error:
            self._log.warning("each process counts the tokens of keys by itself: %s", error)
            return None

    def used_by(self, tenant: str, per_minute: int) -> float:
        """Tokens used that have not come back."""
        used, then = self._used.get(tenant, (0.0, 0.0))
        return max(0.0, used - (self._clock() - then) * per_minute / 60)


def _open(file: Path) -> int:
    """A descriptor that lasts as long as this process: to close any of a file's gives all of the locks back."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(file: int, byte: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):  # another process has it
        return False
    return True


def _first(tenant: str) -> int:
    """Offset of a tenant's first slot in the file; one of 2^51."""
    return (int.from_bytes(blake2b(tenant.encode(), digest_size=8).digest(), "big") >> 13) * MAX_SHARED_SLOTS
