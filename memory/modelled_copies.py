"""Copies that move no bytes but take the time a link would: for the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .copy_engine import GROUP_BYTES, CopyEngine
from .copy_plan import CopyGroup
from .transfer import Transfer


class ModelledCopies(CopyEngine):
    """A full-duplex link of `bandwidth` bytes per second each way; every copy costs `latency` seconds besides.

    Copies of one direction follow each other. clock: virtual seconds; sleep: lets virtual seconds pass. An image may be
    anything. An event is the virtual time at which it fires.
    """

    def __init__(
        self,
        num_pages: int,
        page_elems: int,
        itemsize: int,
        *,
        bandwidth: float,
        latency: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        super().__init__(num_pages, page_elems, itemsize, group_bytes)
        if bandwidth <= 0 or latency < 0:
            raise ValueError(f"bandwidth must be positive and latency not negative, not {bandwidth} and {latency}")
        self._bandwidth = bandwidth
        self._latency = latency
        self._clock = clock
        self._sleep = sleep
        self._free_at = {True: 0.0, False: 0.0}  # by direction: when the link has done what it was given

    def landing_time(self, transfer: Transfer, layer: int) -> float | None:
        """The virtual time at which the bytes of `layer` are there; None while not issued, or when there are none."""
        return transfer.event(layer)

    def check_image(self, image: Any, num_pages: int) -> None:
        """Anything will do."""

    def fence(self, to_device: bool) -> None:
        """Steps are over when the simulator starts the next copy."""

    def issue(self, image: Any, group: CopyGroup, to_device: bool) -> float:
        begin = max(self._clock(), self._free_at[to_device])
        seconds = len(group.runs) * self._latency + group.num_elems * self.itemsize / self._bandwidth
        self._free_at[to_device] = begin + seconds
        return self._free_at[to_device]

    def is_fired(self, event: float) -> bool:
        return self._clock() >= event

    def join(self, event: float) -> None:
        """The simulator asks `landing_time` and adds the wait to the step's duration."""

    def synchronize(self, event: float) -> None:
        self._sleep(max(0.0, event - self._clock()))
