"""Who gives up its pages when running requests need more than there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .request import Request


class VictimPolicy(Protocol):
    """Chooses the request to preempt."""

    def choose(self, running: Sequence[Request]) -> Request:
        """One of `running`, which is in order of admission and not empty."""
        ...


class NewestFirst(VictimPolicy):
    """The one that was admitted last: it has computed least, and who has waited longest is never sent back for it."""

    def choose(self, running: Sequence[Request]) -> Request:
        return running[-1]
