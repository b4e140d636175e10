"""KV that goes over a simulated link."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.costs.models import CostModel
from .adapters import SimTransfer, VirtualClock
from .link import Link, Urgency


class SimSwaps:
    """Copies of KV pages, which take the link from adapters that are loaded, and wait for all-reduces."""

    def __init__(self, costs: CostModel, link: Link, clock: VirtualClock, page_bytes: int) -> None:
        self._costs = costs
        self._link = link
        self._clock = clock
        self._page_bytes = page_bytes
        self._ends: list[SimTransfer] = []

    @property
    def page_seconds(self) -> float:
        """As the profile prices the bytes of a page, there and back."""
        return 2 * self._page_bytes * self._costs.link.per_byte

    def copy_out(self, pages: Sequence[int]) -> tuple[None, SimTransfer | None]:
        return None, self._send(len(pages))

    def copy_in(self, image: None, skip: int, pages: Sequence[int]) -> SimTransfer | None:
        return self._send(len(pages))

    def wait(self, timeout: float) -> None:
        """Move the clock to the first end of a copy, at most by `timeout`."""
        now = self._clock.now
        self._clock.now = min([now + timeout, *(each.end for each in self._ends if each.end > now)])

    def _send(self, num_pages: int) -> SimTransfer | None:
        sending = self._link.send(self._costs.swap_seconds(num_pages * self._page_bytes), Urgency.SWAP)
        self._ends = [each for each in self._ends if not each.is_done()]
        if sending.end <= self._clock.now:
            return None
        self._ends.append(SimTransfer(self._clock, self._link, sending, 1))
        return self._ends[-1]
