"""Staging that a test runs, group by group, in place of a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chorus.memory.transfers.staging import Staging


class PumpedStaging(Staging):
    """Serves every image. `work` copies a group; whoever waits runs it until that is no longer needed."""

    def __init__(self, memory: Sequence[Any], synchronize: Callable[[Any], None]) -> None:
        super().__init__(memory, lambda image: True, synchronize)

    def wake(self):
        pass

    def wait_for(self, is_true, timeout=None):
        while not is_true() and self.work():
            pass
        return is_true()
