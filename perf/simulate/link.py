"""The link of a replica: everything that goes over it, one after another, the more urgent first."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum


class Urgency(IntEnum):
    """Order in which transfers get the link; a more urgent one interrupts others."""

    ALL_REDUCE = 0  # a step is waiting in the middle of a layer
    SWAP = 1
    LOAD = 2
    AHEAD = 3  # no step waits for it


class Sending:
    """A transfer under way. start: when it first got the link. end: when it is through, as things stand now.

    left: seconds that it still needs the link from `resumed` on. ready: it can't end before.
    """

    __slots__ = ("end", "left", "ready", "resumed", "start", "urgency")

    def __init__(self, seconds: float, urgency: Urgency, ready: float) -> None:
        self.left = seconds
        self.urgency = urgency
        self.ready = ready
        self.start = self.resumed = self.end = 0.0


class Link:
    """Gives transfers their turns. Ends are known in advance, and move when something more urgent comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sending: list[Sending] = []  # in order of their turns
        self._free_at = clock()

    @property
    def free_at(self) -> float:
        """When all that has been sent so far is through."""
        return self._free_at

    @property
    def is_busy(self) -> bool:
        return self._free_at > self._clock()

    def send(self, seconds: float, urgency: Urgency = Urgency.LOAD, ready: float = 0.0) -> Sending:
        """Take on a transfer that needs the link for so long and can't end before `ready`."""
        found = Sending(seconds, urgency, ready)
        self._take_turns(found)
        return found

    def hurry(self, sending: Sending, urgency: Urgency) -> None:
        """Raise a transfer's urgency if it was less urgent so far: a step now waits for it."""
        if sending.urgency > urgency and sending.end > self._clock():
            self._sending.remove(sending)
            self._pause(sending)
            sending.urgency = urgency
            self._take_turns(sending)

    def _take_turns(self, new: Sending) -> None:
        now = self._clock()
        waiting = [each for each in self._sending if each.end > now]
        kept = [each for each in waiting if each.urgency <= new.urgency]
        behind = [each for each in waiting if each.urgency > new.urgency]
        for each in behind:
            self._pause(each)
        time = kept[-1].end if kept else now
        if not new.start:
            new.start = time
        for each in (new, *behind):
            if each.start > now:
                each.start = time  # it has not begun
            each.resumed = time
            time = each.end = max(time + each.left, each.ready)
        self._sending = [*kept, new, *behind]
        self._free_at = time

    def _pause(self, sending: Sending) -> None:
        sending.left = max(0.0, sending.left - max(0.0, self._clock() - sending.resumed))
