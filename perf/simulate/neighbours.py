"""Other processes on this machine: how much of the processors they take while something is measured."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, interrupts twice, and what the host of a virtual machine took


class Neighbours:
    """Watches from its making on. None of it is known where the system has no /proc/stat."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._began, self._before = time.perf_counter(), self._others()

    def share(self) -> float:
        """Share of the processors' time that others took; 0 where it is not known.

        Processes that this one has started and waited for are not others.
        """
        seconds, now = time.perf_counter() - self._began, self._others()
        if now is None or self._before is None or seconds <= 0:
            return 0.0
        return max(0.0, (now - self._before) / (seconds * (os.cpu_count() or 1)))

    def _others(self) -> float | None:
        try:
            fields = self._stat.read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        busy = sum(int(fields[index]) for index in _BUSY) / os.sysconf("SC_CLK_TCK")
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return busy - time.process_time() - children.ru_utime - children.ru_stime
