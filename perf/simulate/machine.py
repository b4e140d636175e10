"""Processors of one machine in virtual time, which its busy processes share."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

#: Called with the time at which a job has ended.
Then = Callable[[float], None]


LONGEST_REST = 0.1
"""Seconds of rest from which on a process's next job costs no more: nothing of it is left in caches. Chosen."""


class Machine:
    """Advances each busy process at speed · min(1, processors / busy processes).

    So all busy processes advance alike, and a job ends once each of them has advanced by the job's work since it began:
    the order of ends is known when a job begins, though their times move with every job that comes or ends.
    """

    def __init__(self, processors: float = math.inf, speed: float = 1.0) -> None:
        """processors: as many as there are processes, unless given. speed: the part of a busy processor's time that a
        hypervisor leaves to it.
        """
        if not processors > 0:
            raise ValueError(f"a machine can't have {processors:g} processors; give more than 0")
        if not 0 < speed <= 1:
            raise ValueError(f"a processor can't have a speed of {speed:g}; give more than 0 and at most 1")
        self.processors, self.speed = processors, speed
        self._jobs: list[tuple[float, int, Then]] = []  # (advance at its end, order, then)
        self._order = itertools.count()
        self._advance, self._now = 0.0, -math.inf  # of each busy process, up to that time

    @property
    def next_end(self) -> float:
        """When the next job ends, if none comes before."""
        return self._now + (self._jobs[0][0] - self._advance) / self._rate if self._jobs else math.inf

    def begin(self, now: float, work: float, then: Then) -> None:
        """Have a process that was idle do a job, of `work` seconds on a processor of its own."""
        if self._jobs:
            self._advance += (now - self._now) * self._rate
        self._now = now
        heappush(self._jobs, (self._advance + work, next(self._order), then))

    def end_next(self) -> None:
        """End the next job, at its time."""
        self._now = self.next_end
        self._advance, _, then = heappop(self._jobs)
        then(self._now)

    @property
    def _rate(self) -> float:
        return self.speed * min(1.0, self.processors / len(self._jobs))


class Process:
    """Does its jobs on a machine, one after another.

    per_rest: seconds that a job takes longer for each second that the process rested before, up to `LONGEST_REST`.
    """

    def __init__(self, machine: Machine, per_rest: float = 0.0) -> None:
        self._machine = machine
        self._per_rest = per_rest
        self._ended_at = -math.inf
        self._jobs: deque[tuple[float, Then]] = deque()  # the first is under way

    def do(self, now: float, work: float, then: Then) -> None:
        """Take on a job of `work` seconds; then: called when it has been done."""
        if not self._jobs:
            work += self._per_rest * min(now - self._ended_at, LONGEST_REST)
        self._jobs.append((work, then))
        if len(self._jobs) == 1:
            self._machine.begin(now, work, self._ended)

    def _ended(self, now: float) -> None:
        _, then = self._jobs.popleft()
        self._ended_at = now
        if self._jobs:
            self._machine.begin(now, self._jobs[0][0], self._ended)
        then(now)
