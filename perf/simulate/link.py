"""The link of a replica: adapters and swapped KV go over it one after another, the more urgent first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from ...core.cold_start import Arrival
from ...core.costs.models import CostModel
from ...memory.transfers.swap_backend import CopyMode


class VirtualClock:
    """A clock that the simulation advances: seconds in `now`."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Urgency(IntEnum):
    """Order in which transfers get the link; a more urgent one interrupts others."""

    STEP = 0  # a step is waiting in the middle of a layer
    SWAP = 1
    LOAD = 2
    AHEAD = 3  # no step waits for it


class Sending:
    """A transfer in progress. start: when it first got the link. end: when it will be complete, as of now.

    left: seconds of the link that it still needs from `resumed` on. ready: it can't end before.
    """

    __slots__ = ("end", "left", "ready", "resumed", "start", "urgency")

    def __init__(self, seconds: float, urgency: Urgency, ready: float) -> None:
        self.left = seconds
        self.urgency = urgency
        self.ready = ready
        self.start = self.resumed = self.end = 0.0


class Link:
    """Schedules transfers. Their ends are known in advance, and move when a more urgent one comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sending: list[Sending] = []  # in order of their turns
        self._free_at = clock()

    @property
    def free_at(self) -> float:
        """The time at which everything sent so far is complete."""
        return self._free_at

    @property
    def is_busy(self) -> bool:
        return self._free_at > self._clock()

    def send(self, seconds: float, urgency: Urgency = Urgency.LOAD, ready: float = 0.0) -> Sending:
        """Take a transfer that needs the link for so long and can't end before `ready`."""
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


class SimTransfer:
    """An adapter in transit over the link: its layers arrive evenly, the first at `first`, the last at `end`."""

    __slots__ = ("_clock", "_first", "_link", "_num_layers", "_sending")

    def __init__(
        self, clock: VirtualClock, link: Link, sending: Sending, num_layers: int, first: float | None = None
    ) -> None:
        """first: None if the layers are only useful together."""
        self._clock = clock
        self._link = link
        self._sending = sending
        self._num_layers = num_layers
        self._first = first

    @property
    def address(self) -> int:
        """No layers are counted where native code could see them."""
        return 0

    @property
    def end(self) -> float:
        return self._sending.end

    @property
    def first(self) -> float:
        return self._sending.end if self._first is None else self._first

    def stall(self, start: float, seconds: float) -> float:
        """Return the stall of a step that begins at `start`, takes `seconds` otherwise, and waits layer by layer."""
        self._link.hurry(self._sending, Urgency.LOAD)
        # Arrivals and computation are both even, so the wait for the first or for the last layer is the longest.
        last = self.end + seconds / self._num_layers
        return max(0.0, self.first - start, last - start - seconds)

    def arrival(self, now: float) -> Arrival:
        """The view of a step that begins now."""
        return Arrival(self._num_layers, max(0.0, self.first - now), max(0.0, self.end - now))

    def wait_layer(self, layer: int, timeout: float) -> bool:
        share = layer / max(1, self._num_layers - 1)
        return self._clock.now + timeout >= self.first + share * (self.end - self.first)

    def is_done(self) -> bool:
        return self._clock.now >= self.end

    def has_failed(self) -> bool:
        return False

    def cancel(self) -> None:
        """It writes nothing."""

    def is_quiet(self) -> bool:
        return True


class SimSwaps:
    """Copies of KV pages, which compete with adapters for the link, and wait for the same resources as a step."""

    def __init__(self, costs: CostModel, link: Link, clock: VirtualClock, page_bytes: int) -> None:
        self._costs = costs
        self._link = link
        self._clock = clock
        self._page_bytes = page_bytes
        self._ends: list[SimTransfer] = []

    @property
    def page_seconds(self) -> float:
        """The profile's price for the bytes of a page, there and back."""
        return 2 * self._page_bytes * self._costs.link.per_byte

    @property
    def copying(self) -> CopyMode:
        """A copy takes the link's time, as on a GPU."""
        return CopyMode.BACKGROUND

    def copy_out(self, pages: Sequence[int], *, ahead: bool = False) -> tuple[None, SimTransfer | None]:
        return None, self._send(len(pages), Urgency.AHEAD if ahead else Urgency.SWAP)

    def copy_in(self, image: None, skip: int, pages: Sequence[int]) -> SimTransfer | None:
        return self._send(len(pages))

    def new_image(self) -> None:
        """Return an image, which has no bytes here."""

    def bytes_of(self, image: None) -> memoryview:
        """Return no bytes: nothing is written to files."""
        return memoryview(b"")

    def wait(self, timeout: float) -> None:
        """Move the clock to the first end of a copy, at most by `timeout`."""
        now = self._clock.now
        self._clock.now = min([now + timeout, *(each.end for each in self._ends if each.end > now)])

    def _send(self, num_pages: int, urgency: Urgency = Urgency.SWAP) -> SimTransfer | None:
        sending = self._link.send(self._costs.swap_seconds(num_pages * self._page_bytes), urgency)
        self._ends = [each for each in self._ends if not each.is_done()]
        if sending.end <= self._clock.now:
            return None
        self._ends.append(SimTransfer(self._clock, self._link, sending, 1))
        return self._ends[-1]
