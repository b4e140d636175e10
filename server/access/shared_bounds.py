"""Counts requests in progress and used tokens per key, in one process or in all processes that share a directory."""

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
"""Largest limit that processes share; a taken slot costs 0.7 µs to check. Larger limits are per process."""

MERGE_SECONDS = 0.1
"""Seconds before the other processes know of tokens used in this one."""


class RequestSlots:
    """Request slots of tenants: how many requests each has in progress.

    Each request holds a slot: a lock on one byte of an empty file. The operating system releases a process's locks
    whenever the process ends.
    """

    def __init__(self, file: Path | None = None) -> None:
        """file: shared by processes; None: there is only this process."""
        self._file = None if file is None else _open(file)
        self._held: dict[str, set[int]] = defaultdict(set)

    def take(self, tenant: str, most: int) -> int | None:
        """A free slot among a tenant's `most`; None if all are taken."""
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


class TokenBudgets:
    """Token budgets of tenants: used tokens of `tokens_per_minute`, which come back evenly.

    A request may begin while something is left, and pays as it generates. So a tenant can owe the tokens of its
    requests in progress, and must then wait until they have come back. Processes that share a file add up their counts
    there every `MERGE_SECONDS`. While the file can't be written, each process counts only its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, file: Path | None = None) -> None:
        """clock: the same in all processes, such as the system's."""
        self._clock = clock
        self._used: dict[str, Spent] = {}
        self._limits: dict[str, int] = {}
        self._unshared: dict[str, tuple[int, int]] = {}  # tokens that are not in the file yet, and the limit
        self._merge_at = 0.0
        self._log = RareLog(log, clock=clock)
        self._num_unreadable = 0
        self._slots = None if file is None else self._open(file)

    def check(self, tenant: str, per_minute: int) -> None:
        """Raises an ApiError if a tenant has nothing left."""
        self._limits[tenant] = per_minute
        self._merge_one(tenant, per_minute)
        used = self.used_by(tenant, per_minute)
        if used >= per_minute:
            message = f"your key's {per_minute} tokens per minute are used up; try again later"
            wait = (used - per_minute + 1) * 60 / per_minute
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=wait)

    def spend(self, tenant: str, per_minute: int, tokens: int) -> None:
        self._used[tenant] = Spent(self.used_by(tenant, per_minute) + tokens, self._clock())
        if self._slots is not None:
            self._unshared[tenant] = self._unshared.get(tenant, (0, 0))[0] + tokens, per_minute
            if self._clock() >= self._merge_at:
                self.share()

    def left(self) -> dict[str, float]:
        """Tokens that the tenants that have come may use now; below 0 they owe tokens."""
        return {tenant: most - self.used_by(tenant, most) for tenant, most in [*self._limits.items()]}

    def share(self) -> None:
        """Write the used tokens to the file now, at the end of this process."""
        self._merge_at = self._clock() + MERGE_SECONDS
        for tenant, (_, per_minute) in list(self._unshared.items()):
            if not self._merge_one(tenant, per_minute):
                return

    def _merge_one(self, tenant: str, per_minute: int) -> bool:
        """Add a tenant's tokens used here to the file's count, and adopt the sum; False on an error."""
        if self._slots is None:
            return True
        tokens = self._unshared.get(tenant, (0, 0))[0]
        try:
            self._used[tenant] = self._slots.add(tenant, tokens, per_minute)
        except OSError as error:
            self._log.warning("can't share the tokens used by keys with the other processes: %s", error)
            return False
        self._unshared.pop(tenant, None)
        if self._slots.num_unreadable > self._num_unreadable:
            self._num_unreadable = self._slots.num_unreadable
            self._log.warning(
                "the shared file of used tokens was damaged: a key's tokens count as unused (%d so far)",
                self._num_unreadable,
            )
        return True

    def _open(self, file: Path) -> SpentSlots | None:
        try:
            return SpentSlots(file, self._clock)
        except OSError as error:
            self._log.warning("each process counts the tokens of keys alone: %s", error)
            return None

    def used_by(self, tenant: str, per_minute: int) -> float:
        """Used tokens that have not come back yet."""
        used, then = self._used.get(tenant, (0.0, 0.0))
        return max(0.0, used - (self._clock() - then) * per_minute / 60)


def _open(file: Path) -> int:
    """A descriptor that lives as long as this process: closing any descriptor of a file releases all of its locks."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(file: int, byte: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):  # another process holds it
        return False
    return True


def _first(tenant: str) -> int:
    """Offset of a tenant's first slot in the file; one of 2^51."""
    return (int.from_bytes(blake2b(tenant.encode(), digest_size=8).digest(), "big") >> 13) * MAX_SHARED_SLOTS
